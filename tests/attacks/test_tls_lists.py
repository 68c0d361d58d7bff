"""Lists of certificates that change under a daemon that runs: who is taken off is out at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kvtier.v1 import kvtier_pb2 as pb
from kvtier.v1.kvtier_pb2_grpc import KVTierStub
from tests.support.authority import Authority, Identity
from tests.support.processes import eventually
from tests.support.raw_client import chain, open_session
from tests.support.tenant_daemon import Tenants, matched, running_tenants
from tests.support.tls_client import greet, is_closed, put, shake_hands, tls_calls

READ, ENDED = "lists of certificates read again", "certificate listed otherwise"
HASHES = chain(3, seed=8)


@dataclass(frozen=True)
class Node:
    """A daemon whose lists stand in a file."""

    tenants: Tenants
    authority: Authority
    path: Path

    @property
    def port(self) -> int:
        return int(self.tenants.daemon.ready["tcp"].rpartition(":")[2])

    def client(self, name: str) -> Identity:
        return self.authority.vouch(name, f"dns:{name}")

    def calls(self, name: str) -> AbstractContextManager[KVTierStub]:
        return tls_calls(self.port, self.client(name), self.authority.path)

    def refused(self, name: str) -> list[str]:
        """Lines that say so of this name."""
        told = self.tenants.lines("tls connection refused")
        return [line for line in told if f"{name} " in line and "is in no list" in line]

    def reload(self, text: str, event: str = READ) -> str:
        """With this in the file; the line that says so."""
        before = len(self.tenants.lines(event))
        self.path.write_text(text)
        self.tenants.daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: len(self.tenants.lines(event)) > before, "no line says so")
        return self.tenants.lines(event)[-1]


def match_count(stub: KVTierStub, request: pb.MatchRequest) -> int | None:
    try:
        return int(stub.Match(request, timeout=10).matched_count)
    except grpc.RpcError:
        return None


def lists(*, engines: str = "", readers: str = "", more: str = "") -> str:
    """Of the tenant red; names with commas between them."""
    return (
        f"[tenant.red]\ncertificates = {_named(engines)}\nreader_certificates = {_named(readers)}\n"
        f'[tenant.blue]\ncertificates = ["dns:engine.blue"]\n{more}'
    )


def _named(names: str) -> str:
    return str([f"dns:{one}" for one in names.split(",") if one])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    authority = Authority(tmp_path)
    own = authority.vouch("daemon", "ip:127.0.0.1")
    path = tmp_path / "kvtier.toml"
    path.write_text(lists(engines="first.red,second.red"))
    options = {
        "grpc.tcp": "127.0.0.1:0",
        "grpc.tls_certificate": str(own.certificate),
        "grpc.tls_private_key": str(own.private_key),
        "grpc.tls_authorities": str(authority.path),
    }
    program = [sys.executable, "-m", "kvtier.cli.main", "serve", "--config", str(path)]
    with running_tenants({"red": {}, "blue": {}}, options, program=program) as tenants:
        tenants.daemon.wait_populated()
        yield Node(tenants, authority, path)


def test_who_is_taken_off_is_refused_and_its_connections_end_and_nobody_elses(node: Node) -> None:
    with (
        node.calls("first.red") as first,
        node.calls("second.red") as second,
        node.calls("engine.blue") as blue,
    ):
        opened = greet(first, model="m")
        assert put(first, opened, HASHES, 7) == 3
        watches = [
            stub.Watch(pb.WatchRequest(token=one.token, namespace_id=one.namespace_id), timeout=60)
            for stub, one in (
                (first, opened),
                (second, greet(second, model="m")),
                (blue, greet(blue, model="m")),
            )
        ]
        assert "names=2" in node.reload(lists(engines="second.red"))
        with pytest.raises(grpc.RpcError) as caught:
            for _ in watches[0]:
                pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        [line] = node.tenants.lines(ENDED)
        assert "certificate=dns:first.red" in line
        assert "tenant=red" in line
        with shake_hands(node.port, node.client("first.red"), node.authority.path) as again:
            assert is_closed(again)
        eventually(lambda: bool(node.refused("first.red")), "no line says so")
        for stub, watch in ((second, watches[1]), (blue, watches[2])):
            assert watch.is_active(), "another's connection was ended"
            greet(stub)
            watch.cancel()
        assert len(node.tenants.lines(ENDED)) == 1
        with open_session(node.tenants.socket("red")) as local:
            namespace = local.open_namespace(model="m").namespace_id
            assert matched(local, namespace, HASHES) == 3, "its blocks are the tenant's"
        assert "names=3" in node.reload(lists(engines="first.red,second.red"))
        with node.calls("first.red") as back:
            greet(back)


def test_who_may_less_than_before_may_less_with_an_old_token_too(node: Node) -> None:
    with node.calls("first.red") as stub:
        opened = greet(stub, model="m")
        assert put(stub, opened, HASHES, 7) == 3
        node.reload(lists(readers="first.red"))
        eventually(lambda: len(node.tenants.lines(ENDED)) == 1, "its connection ends")
        request = pb.MatchRequest(
            token=opened.token, namespace_id=opened.namespace_id, hashes=b"".join(HASHES)
        )
        eventually(lambda: match_count(stub, request) == 3, "it connects again")
        with pytest.raises(grpc.RpcError) as caught:
            put(stub, opened, chain(2, seed=9), 7)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert match_count(stub, request) == 3


def test_a_file_with_a_mistake_changes_nothing_and_what_needs_a_restart_is_named(
    node: Node,
) -> None:
    with node.calls("first.red") as stub:
        token = greet(stub).token
        for text in ("[tenant.red", "[tenant.red]\ncertificates = 7\n"):
            node.reload(text, "configuration cannot be used")
            stub.Stats(pb.StatsRequest(token=token), timeout=10)
        line = node.reload(lists(engines="first.red", more="[lease]\nseconds_max = 7\n"))
        assert "restart=lease.seconds_max" in line
        stub.Stats(pb.StatsRequest(token=token), timeout=10)
        assert node.tenants.lines(ENDED) == []
