"""Garbage on both doors: the daemon refuses it by name, goes on, and loses nothing."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvtier.v1 import kvtier_pb2 as pb
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.forms import rounds
from tests.support.raw_client import RawCalls, RawSession, connect, hello, open_session, spec

SEED = 20_260_101
SESSION_ROUNDS = rounds(short=200, full=20_000)
CALL_ROUNDS = rounds(short=25, full=3_000)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    options = {"server.hello_seconds": "0.5", "lease.grace_seconds": "0"}
    with running_daemon(dram_bytes="64MiB", slab_bytes="2MiB", options=options) as running:
        running.wait_populated()
        yield running


@pytest.fixture
def chance() -> random.Random:
    return random.Random(SEED)


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Flipped, cut, doubled, or something else altogether."""
    kind = chance.randrange(5)
    if kind == 0 or not data:
        return chance.randbytes(chance.choice((0, 1, 7, 300, 65_536, 66_000)))
    if kind == 1:
        return data[: chance.randrange(len(data))]
    if kind == 2:
        return data + data
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 6)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


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


@pytest.mark.full_form
@pytest.mark.timeout(1800)
def test_fuzzed_session_socket_neither_crashes_nor_leaks(
    daemon: RunningDaemon, chance: random.Random
) -> None:
    folder = Path(f"/proc/{daemon.process.pid}/fd")
    before = len(os.listdir(folder))
    for _ in range(SESSION_ROUNDS):
        with connect(daemon.socket) as session, open("/dev/null", "rb") as file:
            if chance.random() < 0.8:
                opening = hello(session, role=pb.ROLE_TOOL, engine_id=chance.randbytes(16))
                session.send(pb.ClientFrame(hello=opening))
            for _ in range(chance.randrange(12)):
                data = chance.choice(client_frames(chance, session))
                if chance.random() < 0.6:
                    data = mutated(chance, data)
                fds = [file.fileno()] * chance.choice((0, 0, 0, 1, 5))
                try:
                    session.send_bytes(data, fds)
                except OSError:
                    break  # Closed by the daemon: it had seen enough.
    assert_sound(daemon)
    # A session that may hold slots keeps its pidfd until this process is dead.
    kept = before + 2 + int(daemon.metrics()['kvtier_limit_used{limit="sessions"}'])
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


@pytest.mark.full_form
@pytest.mark.timeout(1800)
def test_fuzzed_calls_are_refused_by_name_and_leak_no_slot(
    daemon: RunningDaemon, chance: random.Random
) -> None:
    with (
        open_session(daemon.socket, engine_id=os.urandom(16)) as session,
        grpc.insecure_channel(daemon.grpc_address) as channel,
    ):
        namespace = session.open_namespace(salt="fuzz")
        session.map_slab()
        refused = set()
        for method in pb.DESCRIPTOR.services_by_name["KVTier"].methods:
            if method.name == "Drain":
                continue
            for _ in range(CALL_ROUNDS):
                data = fuzzed_request(chance, method.name, session.token, namespace.namespace_id)
                if (code := outcome_of(channel, method, data)) is not None:
                    refused.add(code)
        assert refused
        allowed = {
            *(grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED),
            *(grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED),
            *(grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.PERMISSION_DENIED),
            grpc.StatusCode.FAILED_PRECONDITION,
        }
        assert refused <= allowed
        session.send(pb.ClientFrame(bye=pb.Bye()))
        assert session.is_closed_by_daemon()
    assert_sound(daemon)


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
    assert "Traceback" not in daemon.log_text
