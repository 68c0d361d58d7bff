"""gRPC for other machines: certificates say who calls; whoever has none costs little."""

from __future__ import annotations

import datetime
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kvtier.cli.main import main
from kvtier.config_grpc import GrpcConfig
from kvtier.metrics.calls import CallMetrics
from kvtier.metrics.registry import Registry
from kvtier.paths import grpc_socket_path
from kvtier.server.certificates import Grants, TlsFiles
from kvtier.server.tls_door import HANDSHAKES_MAX, TlsDoor, TlsSettings
from kvtier.v1 import kvtier_pb2 as pb
from kvtier.v1.kvtier_pb2_grpc import KVTierStub
from tests.support.authority import Authority, Identity
from tests.support.processes import eventually
from tests.support.raw_client import RawCalls, chain, open_session
from tests.support.tenant_daemon import Tenants, matched, offload, running_tenants
from tests.support.tls_client import (
    HALF_A_CALL,
    PREFACE,
    SETTINGS,
    got,
    greet,
    half_a_call,
    is_closed,
    put,
    shake_hands,
    tls_calls,
)

REFUSED = "tls connection refused"
HELLO_SECONDS, IDLE_SECONDS = 0.5, 1.0


@dataclass(frozen=True)
class Node:
    """A daemon with tenants, and who vouches for its clients."""

    tenants: Tenants
    authority: Authority
    folder: Path

    @property
    def port(self) -> int:
        return int(self.tenants.daemon.ready["tcp"].rpartition(":")[2])

    def client(self, name: str) -> Identity:
        return self.authority.vouch(name, f"dns:{name}")

    def calls(self, identity: Identity) -> AbstractContextManager[KVTierStub]:
        return tls_calls(self.port, identity, self.authority.path)

    def refused_count(self, reason: str) -> float:
        name = f'kvtier_tls_refused_connections_total{{reason="{reason}"}}'
        return self.tenants.daemon.metrics()[name]

    def refused_since(self, count: int) -> list[str]:
        """Lines about refused connections after the first `count`; waits for one."""
        eventually(lambda: len(self.tenants.lines(REFUSED)) > count, "no line says so")
        return self.tenants.lines(REFUSED)[count:]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder)
    own = authority.vouch("daemon", "ip:127.0.0.1")
    options = {
        "grpc.tcp": "0.0.0.0:0",
        "grpc.tls_certificate": str(own.certificate),
        "grpc.tls_private_key": str(own.private_key),
        "grpc.tls_authorities": str(authority.path),
        "grpc.operator_certificates": "dns:operator",
        "grpc.idle_seconds": str(IDLE_SECONDS),
        "server.hello_seconds": str(HELLO_SECONDS),
    }
    named = {
        "red": {
            "certificates": "dns:engine.red,dns:brief.red",
            "reader_certificates": "dns:reader.red",
            "admin_certificates": "dns:admin.red",
        },
        "blue": {"certificates": "dns:engine.blue"},
    }
    with running_tenants(named, options) as tenants:
        tenants.daemon.wait_populated()
        yield Node(tenants, authority, folder)


def code_of(call: object, request: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=10)  # type: ignore[operator]
    return caught.value.code(), caught.value.details()


def test_a_certificate_says_whose_blocks_are_read_and_written(node: Node) -> None:
    hashes = chain(3, seed=1)
    with (
        node.calls(node.client("engine.red")) as engine,
        node.calls(node.client("reader.red")) as reader,
        node.calls(node.client("engine.blue")) as blue,
    ):
        of_red = greet(engine, model="m")
        assert put(engine, of_red, hashes, 7) == 3
        reading = greet(reader, model="m")
        assert got(reader, reading, hashes) == [bytes([7]) * 4096] * 3
        assert got(blue, greet(blue, model="m"), hashes) == []
        piece = pb.PutRequest(token=reading.token, namespace_id=reading.namespace_id)
        code, text = code_of(reader.Put, iter([piece]))
        assert (code, "a reader" in text) == (grpc.StatusCode.PERMISSION_DENIED, True)
        reserve = pb.ReserveRequest(token=of_red.token, namespace_id=of_red.namespace_id, count=1)
        code, text = code_of(engine.Reserve, reserve)
        assert "use Put and Get" in text, "slots need shared memory"
        clear = pb.ClearRequest(token=of_red.token, namespace_id=of_red.namespace_id)
        assert code_of(engine.Clear, clear)[0] is grpc.StatusCode.PERMISSION_DENIED
    with open_session(node.tenants.socket("red")) as local:
        assert matched(local, local.open_namespace(model="m").namespace_id, hashes) == 3


def test_an_administrator_clears_from_afar_and_only_the_operator_checks(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    with node.calls(node.client("admin.red")) as admin:
        opened = greet(admin, model="cleared")
        assert put(admin, opened, chain(2), 3) == 2
        listed = admin.List(
            pb.ListRequest(token=opened.token, namespace_id=opened.namespace_id), timeout=10
        )
        assert len(listed.hashes) == 2 * 16
        clear = pb.ClearRequest(token=opened.token, namespace_id=opened.namespace_id)
        assert admin.Clear(clear, timeout=10).voided_count == 2
        code, _ = code_of(admin.Drain, pb.DrainRequest(token=opened.token))
        assert code is grpc.StatusCode.PERMISSION_DENIED
    operator = node.client("operator")
    words = ["--socket", f"tcp://127.0.0.1:{node.port}", "--json"]
    words += ["--tls-certificate", str(operator.certificate)]
    words += ["--tls-private-key", str(operator.private_key)]
    words += ["--tls-authorities", str(node.authority.path)]
    capsys.readouterr()
    assert main(["check", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["violations"] == []
    assert main(["stats", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    [fingerprint] = [one["fingerprint"] for one in told["namespaces"] if one["model"] == "cleared"]
    assert main(["purge", "--namespace", fingerprint, *words]) == 0


def test_a_stolen_token_counts_for_no_other_certificate_and_not_for_a_local_socket(
    node: Node,
) -> None:
    with (
        node.calls(node.client("admin.red")) as admin,
        node.calls(node.client("reader.red")) as reader,
        node.calls(node.client("engine.blue")) as blue,
        open_session(node.tenants.socket("red")) as local,
    ):
        token = greet(admin).token
        stolen = [
            (reader, token, "another certificate's"),
            (blue, token, "another socket"),
            (reader, local.token, "another certificate's"),
        ]
        before = len(node.tenants.lines("call refused"))
        for stub, one, words in stolen:
            code, text = code_of(stub.Stats, pb.StatsRequest(token=one))
            assert (code, words in text) == (grpc.StatusCode.PERMISSION_DENIED, True), text
        with RawCalls(local.opened.grpc_address) as stub:
            code, text = code_of(stub.Stats, pb.StatsRequest(token=token))
            assert code is grpc.StatusCode.PERMISSION_DENIED
        assert len(node.tenants.lines("call refused")) == before + 4
        assert "certificate=dns:reader.red" in node.tenants.lines("call refused")[before]
        admin.Stats(pb.StatsRequest(token=token), timeout=10)


def test_who_shows_no_certificate_that_counts_is_refused_counted_and_logged_once(
    node: Node, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other")
    expired = node.authority.vouch("old", "dns:engine.red", ends_in=-datetime.timedelta(minutes=1))
    twice = node.authority.vouch("twice", "dns:engine.red", "dns:engine.blue")
    cases = [
        (None, "certificate", "it has no certificate"),
        (other.vouch("forged", "dns:engine.red"), "certificate", "unable to get local issuer"),
        (expired, "certificate", "certificate has expired"),
        (node.client("nobody"), "unknown", "is in no list"),
        (twice, "unknown", "is in several lists"),
    ]
    hashes = chain(2, seed=2)
    with open_session(node.tenants.socket("red")) as good:
        namespace = good.open_namespace(model="good").namespace_id
        good.map_slab()
        offload(good, namespace, hashes, 5)
        for identity, kind, reason in cases:
            lines = len(node.tenants.lines(REFUSED))
            count = node.refused_count(kind)
            with shake_hands(node.port, identity, node.authority.path) as connection:
                assert is_closed(connection)
            (told,) = node.refused_since(lines)
            assert reason in told
            assert node.refused_count(kind) == count + 1
        with shake_hands(
            node.port, node.client("engine.red"), node.authority.path, alpn=("http/1.1",)
        ) as connection:
            assert is_closed(connection), "TLS, and no gRPC"
        assert matched(good, namespace, hashes) == 2, "nothing was lost"


def test_half_a_handshake_half_a_preface_and_an_idle_connection_end(node: Node) -> None:
    identity = node.client("engine.red")
    late, lines = node.refused_count("late"), len(node.tenants.lines(REFUSED))
    began = time.monotonic()
    with ExitStack() as opened, node.calls(identity) as stub:
        token = greet(stub).token
        halves = [PREFACE[:10], PREFACE + SETTINGS, PREFACE + SETTINGS + b"\0\1\0\1\4"]
        connections = [
            opened.enter_context(shake_hands(node.port, identity, node.authority.path))
            for _ in (*halves, HALF_A_CALL)
        ]
        for connection, said in zip(connections, (*halves, HALF_A_CALL), strict=True):
            connection.sendall(said)
        with socket.create_connection(("127.0.0.1", node.port), timeout=10) as raw:
            raw.sendall(b"\x16\x03\x01\x02\x00\x01")  # The head of a ClientHello.
            assert is_closed(raw)
        assert HELLO_SECONDS * 0.8 < time.monotonic() - began < 8
        assert len(node.refused_since(lines)) == 1
        assert node.refused_count("late") == late + 1
        for connection in connections:
            assert is_closed(connection)
        assert time.monotonic() - began > IDLE_SECONDS
        stub.Stats(pb.StatsRequest(token=token), timeout=10)  # It connects again by itself.


def test_a_crowd_of_half_handshakes_keeps_nobody_out_and_leaks_nothing(node: Node) -> None:
    folder = f"/proc/{node.tenants.daemon.process.pid}/fd"
    identity = node.client("engine.red")
    before = len(os.listdir(folder))
    with crowd(node.port), node.calls(identity) as stub:
        greet(stub)
    eventually(lambda: len(os.listdir(folder)) <= before + 2, "descriptors leaked")


@contextmanager
def crowd(port: int) -> Iterator[list[socket.socket]]:
    """More handshakes than there may be, each begun and no more."""
    with ExitStack() as opened:
        connections = []
        for _ in range(HANDSHAKES_MAX + 8):
            raw = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            raw.sendall(b"\x16\x03\x01")
            connections.append(raw)
        yield connections


def test_of_too_many_handshakes_the_oldest_end(node: Node) -> None:
    own = node.authority.vouch("patient", "ip:127.0.0.1")
    config = GrpcConfig(
        "127.0.0.1:0", *map(str, (own.certificate, own.private_key, node.authority.path))
    )
    metrics = CallMetrics(Registry())
    failures: list[BaseException] = []
    settings = TlsSettings(TlsFiles(config), Grants({}), hello_seconds=60.0)
    door = TlsDoor(settings, {}, metrics, failures.append)
    port = int(door.listen(config.tcp).rpartition(":")[2])
    door.start()
    try:
        with crowd(port) as connections:
            assert all(is_closed(one) for one in connections[:8])
            connections[8].settimeout(0.05)
            assert not is_closed(connections[8])
    finally:
        door.close()
    assert metrics.refused_connections.labels("crowd")._value.get() == 8
    assert failures == []


def test_a_connection_ends_when_its_certificate_does(node: Node) -> None:
    brief = node.authority.vouch("brief", "dns:brief.red", ends_in=datetime.timedelta(seconds=2))
    with node.calls(brief) as stub:
        opened = greet(stub, model="m")
        asked = pb.WatchRequest(token=opened.token, namespace_id=opened.namespace_id)
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Watch(asked, timeout=10))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    eventually(lambda: bool(node.tenants.lines("certificate expired")), "no line says so")
    lines = node.tenants.lines("certificate expired")
    assert len(lines) == 1
    assert "certificate=dns:brief.red" in lines[0]


def test_new_files_count_from_the_next_connection_and_broken_ones_do_not(
    node: Node, tmp_path: Path
) -> None:
    identity = node.client("engine.red")
    own = node.authority.folder / "daemon.pem"
    with node.calls(identity) as stub:
        token = greet(stub).token
        before = presented(node, identity)
        own.write_bytes(own.read_bytes()[:100])
        assert presented(node, identity) == before
        assert len(node.tenants.lines("tls files cannot be used")) == 1
        node.authority.vouch("daemon", "ip:127.0.0.1")
        assert presented(node, identity) != before
        successor = Authority(tmp_path, "successor")
        own_path = node.authority.path
        former = own_path.read_bytes()
        own_path.write_bytes(successor.path.read_bytes())
        try:
            stub.Stats(pb.StatsRequest(token=token), timeout=10)
            (tmp_path / "former").write_bytes(former)
            with shake_hands(node.port, identity, tmp_path / "former") as connection:
                assert is_closed(connection), "nobody vouches for it any more"
            renewed = successor.vouch("renewed", "dns:engine.red")
            with tls_calls(node.port, renewed, tmp_path / "former") as other:
                other.Stats(pb.StatsRequest(token=token), timeout=10)  # The same name: the same.
        finally:
            own_path.write_bytes(former)


def test_a_call_whose_name_is_no_text_cuts_one_tenants_grpc_off_for_a_moment(node: Node) -> None:
    bad = half_a_call(b"/kvtier.v1.KVTier/\xff\xfe")
    before = len(node.tenants.lines("gRPC has ended"))
    with (
        node.calls(node.client("engine.blue")) as blue,
        shake_hands(node.port, node.client("engine.red"), node.authority.path) as attacker,
        socket.socket(socket.AF_UNIX) as local,
    ):
        token = greet(blue).token
        watched = greet(blue, model="m")
        asked = pb.WatchRequest(token=watched.token, namespace_id=watched.namespace_id)
        watch = blue.Watch(asked)
        attacker.sendall(bad)
        local.connect(str(grpc_socket_path(node.tenants.socket("red"))))
        local.sendall(bad)
        eventually(lambda: len(node.tenants.lines("gRPC has ended")) == before + 2, "it ended")
        blue.Stats(pb.StatsRequest(token=token), timeout=10)
        assert watch.is_active(), "another tenant's call was cut"
        watch.cancel()
    with node.calls(node.client("engine.red")) as red:
        eventually(lambda: is_answered(red), "it does not begin anew")
    with open_session(node.tenants.socket("red")) as session:
        assert matched(session, session.open_namespace().namespace_id, chain(1)) == 0


def is_answered(stub: KVTierStub) -> bool:
    try:
        greet(stub)
    except grpc.RpcError:
        return False
    return True


def presented(node: Node, identity: Identity) -> bytes | None:
    """The daemon's certificate."""
    with shake_hands(node.port, identity, node.authority.path) as connection:
        return connection.getpeercert(binary_form=True)
