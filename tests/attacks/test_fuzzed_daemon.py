"""Garbage at every door of a running daemon: it refuses it by name, goes on, and loses nothing."""

from __future__ import annotations

import os
import random
import re
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kvtier.lane import LANE_CALLS, pack
from kvtier.paths import grpc_socket_path, lane_socket_path
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.authority import Authority, Identity
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.fuzzing import fuzz, mutated
from tests.support.processes import eventually
from tests.support.raw_client import (
    RawCalls,
    RawSession,
    chain,
    connect,
    hello,
    open_session,
    spec,
)
from tests.support.tenant_daemon import matched, offload
from tests.support.tls_client import HALF_A_CALL, PREFACE, SETTINGS, shake_hands

pytestmark = [pytest.mark.full_form, pytest.mark.timeout(900)]

HASHES = chain(4, seed=77)
# Of a call whose name is no UTF-8, by gRPC's library: the daemon makes the server anew.
GRPCS_OWN = re.compile(r'Traceback [^\n]*\n +File "src/python/grpcio/[^\n]*\nUnicodeDecodeError')
METHODS = [
    method for method in pb.DESCRIPTOR.services_by_name["KVTier"].methods if method.name != "Drain"
]


@dataclass(frozen=True)
class Fuzzed:
    """A daemon, and a client that goes on to work while others send garbage."""

    daemon: RunningDaemon
    good: RawSession
    namespace_id: int
    identity: Identity
    authorities: Path

    def check(self) -> None:
        """Nobody noticed."""
        assert_sound(self.daemon)
        assert matched(self.good, self.namespace_id, HASHES) == len(HASHES), "blocks were lost"
        for number in self.slots:
            assert bytes(self.good.slot_view(number)) == bytes([9]) * 4096, "wrong bytes"

    @property
    def slots(self) -> list[int]:
        """Where the good client's blocks lie, by its own lease."""
        with RawCalls(self.good.opened.grpc_address) as stub:
            request = pb.AcquireRequest(
                token=self.good.token,
                namespace_id=self.namespace_id,
                hashes=b"".join(HASHES),
                deadline_ns=time.monotonic_ns() + 5 * 10**9,
            )
            ready = list(stub.Acquire(request, timeout=10))[-1].ready
            stub.Release(
                pb.ReleaseRequest(token=self.good.token, lease_ids=[ready.lease_id]), timeout=10
            )
        return list(ready.slots)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    authority = Authority(tmp_path_factory.mktemp("fuzz"))
    own = authority.vouch("daemon", "ip:127.0.0.1")
    options = {
        "server.hello_seconds": "0.5",
        "lease.grace_seconds": "0",
        "grpc.tcp": "127.0.0.1:0",
        "grpc.tls_certificate": str(own.certificate),
        "grpc.tls_private_key": str(own.private_key),
        "grpc.tls_authorities": str(authority.path),
        "grpc.certificates": "dns:fuzz",
        "grpc.idle_seconds": "2",
    }
    with running_daemon(dram_bytes="64MiB", slab_bytes="2MiB", options=options) as daemon:
        daemon.wait_populated()
        with open_session(daemon.socket, engine_id=b"G" * 16) as good:
            namespace_id = good.open_namespace(salt="good").namespace_id
            good.map_slab()
            offload(good, namespace_id, HASHES, 9)
            identity = authority.vouch("fuzz", "dns:fuzz")
            yield Fuzzed(daemon, good, namespace_id, identity, authority.path)


def client_frames(chance: random.Random, session: RawSession) -> list[bytes]:
    number = chance.choice((0, 1, 2, 99, 2**31, 2**32 - 1))
    asked = pb.OpenNamespace(spec=spec(salt=str(chance.randrange(4))), about=number)
    frames = [
        pb.ClientFrame(hello=hello(session, engine_id=chance.randbytes(16))),
        pb.ClientFrame(open_namespace=asked),
        pb.ClientFrame(slab_mapped=pb.SlabMapped(slab_id=number)),
        pb.ClientFrame(slab_unmapped=pb.SlabUnmapped(slab_id=number)),
        pb.ClientFrame(quiet=pb.Quiet(session_id=number)),
        pb.ClientFrame(bye=pb.Bye()),
    ]
    return [frame.SerializeToString() for frame in frames]


def test_fuzzed_session_socket(fuzzed: Fuzzed) -> None:
    daemon = fuzzed.daemon
    folder = Path(f"/proc/{daemon.process.pid}/fd")
    before = len(os.listdir(folder))

    def attempt(chance: random.Random) -> None:
        # Closed by the daemon: it had seen enough, or waited long enough.
        with suppress(OSError), connect(daemon.socket) as session, open("/dev/null") as file:
            if chance.random() < 0.8:
                opening = hello(session, role=pb.ROLE_TOOL, engine_id=chance.randbytes(16))
                session.send(pb.ClientFrame(hello=opening))
            for _ in range(chance.randrange(12)):
                data = chance.choice(client_frames(chance, session))
                if chance.random() < 0.6:
                    data = mutated(chance, data)
                if chance.random() < 0.01:
                    data = chance.randbytes(66_000)
                session.send_bytes(data, [file.fileno()] * chance.choice((0, 0, 0, 1, 5)))

    fuzz("session socket", attempt)
    fuzzed.check()
    # A session that may hold slots keeps its pidfd until this process is dead.
    kept = before + 4 + int(daemon.metrics()['kvtier_limit_used{limit="sessions"}'])
    deadline = time.monotonic() + 10
    while len(os.listdir(folder)) > kept:
        assert time.monotonic() < deadline, "descriptors leaked"
        time.sleep(0.05)


def fuzzed_request(chance: random.Random, method: str, token: bytes, namespace_id: int) -> bytes:
    """A request whose token and namespace are right and whose other fields are anything."""
    kind = getattr(pb, f"{method}Request")
    request = kind()
    for name, value in (("token", token), ("namespace_id", namespace_id)):
        if name in kind.DESCRIPTOR.fields_by_name and chance.random() < 0.9:
            setattr(request, name, value)
    for described in kind.DESCRIPTOR.fields:
        if described.name in ("token", "namespace_id") or chance.random() < 0.3:
            continue
        if described.type == described.TYPE_BYTES:
            sizes = (0, 1, 16, 17, 160, 5000)
            setattr(request, described.name, chance.randbytes(chance.choice(sizes)))
        elif described.name in ("slots", "lease_ids", "checksums", "token_ids"):
            count = chance.choice((0, 1, 10))
            getattr(request, described.name).extend(chance.randrange(2000) for _ in range(count))
        elif described.cpp_type in (described.CPPTYPE_UINT32, described.CPPTYPE_UINT64):
            setattr(request, described.name, chance.choice((0, 1, 5, 2**31, 2**32 - 1)))
    data: bytes = request.SerializeToString()
    return mutated(chance, data) if chance.random() < 0.3 else data


ALLOWED = {
    *(grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED),
    *(grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED),
    *(grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.PERMISSION_DENIED),
    grpc.StatusCode.FAILED_PRECONDITION,
}


def test_fuzzed_calls(fuzzed: Fuzzed) -> None:
    with (
        open_session(fuzzed.daemon.socket, engine_id=os.urandom(16)) as session,
        grpc.insecure_channel(fuzzed.daemon.grpc_address) as channel,
    ):
        namespace = session.open_namespace(salt="fuzz")
        session.map_slab()
        refused = set()

        def attempt(chance: random.Random) -> None:
            method = chance.choice(METHODS)
            data = fuzzed_request(chance, method.name, session.token, namespace.namespace_id)
            if (code := outcome_of(channel, method, data)) is not None:
                assert code in ALLOWED, code
                refused.add(code)

        fuzz("gRPC calls", attempt)
        assert refused
        session.send(pb.ClientFrame(bye=pb.Bye()))
        assert session.is_closed_by_daemon()
    fuzzed.check()


def test_fuzzed_lane(fuzzed: Fuzzed) -> None:
    path = str(lane_socket_path(fuzzed.daemon.socket))
    with open_session(fuzzed.daemon.socket, engine_id=os.urandom(16)) as session:
        namespace = session.open_namespace(salt="fuzz")
        session.map_slab()

        def attempt(chance: random.Random) -> None:
            with socket.socket(socket.AF_UNIX) as lane:
                lane.settimeout(0.05)
                lane.connect(path)
                for _ in range(chance.randrange(1, 6)):
                    number = chance.randrange(len(LANE_CALLS))
                    method = LANE_CALLS[number]
                    call = fuzzed_request(chance, method, session.token, namespace.namespace_id)
                    frame = pack(chance.choice((number, number, number, 9, 255)), call)
                    if chance.random() < 0.3:
                        frame = mutated(chance, frame)
                    with suppress(OSError):
                        lane.sendall(frame)
                        if chance.random() < 0.9 and not lane.recv(1 << 16):
                            return

        fuzz("call lane", attempt)
        session.send(pb.ClientFrame(bye=pb.Bye()))
        assert session.is_closed_by_daemon()
    fuzzed.check()


GET = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n\r\n"


def test_fuzzed_ports(fuzzed: Fuzzed) -> None:
    """HTTP of the status page, TLS before and after the handshake, and local HTTP/2."""
    daemon = fuzzed.daemon
    tls = int(daemon.ready["tcp"].rpartition(":")[2])
    admin = int(daemon.ready["admin"].rpartition(":")[2])
    client_hello = first_bytes(fuzzed)

    def opened(chance: random.Random) -> tuple[socket.socket, bytes]:
        kind = chance.randrange(4)
        if kind == 0:
            return socket.create_connection(("127.0.0.1", admin), timeout=0.2), GET
        if kind == 1:
            return socket.create_connection(("127.0.0.1", tls), timeout=0.2), client_hello
        if kind == 2:
            return shake_hands(tls, fuzzed.identity, fuzzed.authorities), HALF_A_CALL
        local = socket.socket(socket.AF_UNIX)
        local.settimeout(0.2)
        local.connect(str(grpc_socket_path(daemon.socket)))
        return local, HALF_A_CALL

    def attempt(chance: random.Random) -> None:
        with suppress(OSError):  # gRPC may be about to begin anew.
            connection, right = opened(chance)
            say(chance, connection, right)

    def say(chance: random.Random, connection: socket.socket, right: bytes) -> None:
        with connection:
            head = PREFACE + SETTINGS
            is_http2 = right.startswith(head) and chance.random() < 0.8
            data = (
                head + mutated(chance, right[len(head) :]) if is_http2 else mutated(chance, right)
            )
            connection.sendall(data)
            if chance.random() < 0.5:
                connection.settimeout(0.05)
                connection.recv(4096)

    fuzz("ports", attempt)
    fuzzed.check()


def first_bytes(fuzzed: Fuzzed) -> bytes:
    """A ClientHello."""
    outgoing = ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=str(fuzzed.authorities))
    context.set_alpn_protocols(["h2"])
    machine = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1")
    with suppress(ssl.SSLWantReadError):
        machine.do_handshake()
    return outgoing.read()


def outcome_of(channel: grpc.Channel, method: object, data: bytes) -> grpc.StatusCode | None:
    """None for an answer; refusals must begin with a name of ours."""
    path = f"/kvtier.v1.KVTier/{method.name}"  # type: ignore[attr-defined]
    try:
        if method.client_streaming:  # type: ignore[attr-defined]
            channel.stream_unary(path)(iter([data, data]), timeout=2)
        elif method.server_streaming:  # type: ignore[attr-defined]
            list(channel.unary_stream(path)(data, timeout=0.1))
        else:
            channel.unary_unary(path)(data, timeout=5)
    except grpc.RpcError as error:
        refusal = error
    else:
        return None
    if refusal.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
        assert ": " in refusal.details(), refusal.details()
    return refusal.code()


def assert_sound(daemon: RunningDaemon) -> None:
    """Alive, invariants hold, nothing is reserved."""
    assert daemon.process.poll() is None, daemon.log_text
    eventually(grpc_socket_path(daemon.socket).is_socket, "gRPC begins anew")
    with (
        open_session(daemon.socket, role=pb.ROLE_TOOL) as session,
        RawCalls(daemon.grpc_address) as stub,
    ):
        checked = stub.Check(pb.CheckRequest(token=session.token), timeout=10)
        assert list(checked.violations) == []
        deadline = time.monotonic() + 5
        while True:
            stats = stub.Stats(pb.StatsRequest(token=session.token), timeout=10)
            if stats.tiers[0].reserved_count == 0:
                break
            assert time.monotonic() < deadline, "slots leaked"
            time.sleep(0.05)
    _, traceback, told = GRPCS_OWN.sub("", daemon.log_text).partition("Traceback")
    assert not traceback, told[:4000]
