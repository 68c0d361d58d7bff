"""The session socket: handshake, bad frames, ends of sessions."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.types import PROTOCOL_VERSION
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.processes import eventually
from tests.support.raw_client import (
    RawCalls,
    RawSession,
    connect,
    hello,
    open_session,
    spec,
    wait_reserved,
)

RESERVE_AND_DIE = """
import os, signal, sys
from tests.support.raw_client import RawCalls, open_session, wait_reserved
session = open_session(sys.argv[1], engine_id=os.urandom(16))
namespace = session.open_namespace(salt="death")
session.map_slab()
with RawCalls(session.opened.grpc_address) as stub:
    wait_reserved(stub, session.token, namespace.namespace_id, 3)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    options = {
        "server.hello_seconds": "0.5",
        "server.sessions_max": "64",
        "lease.grace_seconds": "0.1",
    }
    # A slab for each test's namespace.
    with running_daemon(dram_bytes="128MiB", slab_bytes="2MiB", options=options) as running:
        running.wait_populated()
        yield running


def refused(session: RawSession) -> pb.SessionError:
    """The error that ended this session."""
    error = session.wait_error()
    assert session.is_closed_by_daemon()
    return error


def test_welcome_comes_before_anything_is_said(daemon: RunningDaemon) -> None:
    with connect(daemon.socket) as session:
        assert session.welcome.protocol == PROTOCOL_VERSION
        assert f"{session.welcome.generation:016x}" == daemon.ready["generation"]


def test_hello_opens_a_session_with_a_token(daemon: RunningDaemon) -> None:
    with open_session(daemon.socket) as session:
        assert len(session.token) == 32
        assert not session.opened.by_value
        assert session.opened.lease_ms_max == 60_000
        assert session.opened.grpc_address == daemon.grpc_address


@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION + 2, 0])
def test_version_too_far_away_is_refused(daemon: RunningDaemon, protocol: int) -> None:
    with connect(daemon.socket) as session:
        session.send(pb.ClientFrame(hello=hello(session, protocol=protocol)))
        error = refused(session)
    assert error.name == "ProtocolMismatch"
    assert "upgrade the" in error.message


def test_neighbouring_version_is_welcome(daemon: RunningDaemon) -> None:
    open_session(daemon.socket, protocol=PROTOCOL_VERSION + 1).close()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"engine_id": b"short"}, "engine_id has 5 bytes"),
        ({"role": 0}, "Hello.role is 0"),
        ({"role": 9}, "Hello.role is 9"),
        ({"shards": []}, "Hello.shards is empty"),
        ({"shards": [1, 1]}, "name each shard once"),
        ({"shards": [128]}, "numbered 0 to 127"),
        ({"name": "x" * 65}, "at most 64 characters"),
        ({"welcome_ns": 1}, "send it back unchanged"),
    ],
)
def test_wrong_hello_is_refused_by_name(
    daemon: RunningDaemon, changes: dict[str, object], part: str
) -> None:
    with connect(daemon.socket) as session:
        session.send(pb.ClientFrame(hello=hello(session, **changes)))
        error = refused(session)
    assert error.name == "BadFrame"
    assert part in error.message


def test_clock_of_another_time_namespace_means_by_value(daemon: RunningDaemon) -> None:
    with open_session(daemon.socket, client_ns=time.monotonic_ns() + 3600 * 10**9) as session:
        assert session.opened.by_value
        assert "time namespace" in session.opened.by_value_reason


def test_silent_connection_is_closed(daemon: RunningDaemon) -> None:
    with connect(daemon.socket) as session:
        assert "no Hello within" in refused(session).message


def test_first_frame_must_be_hello(daemon: RunningDaemon) -> None:
    with connect(daemon.socket) as session:
        session.send(pb.ClientFrame(bye=pb.Bye()))
        assert refused(session).message == "the first frame must be Hello"


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"\xff\xff\xff", "3 bytes are no ClientFrame"),
        (b"x" * 70_000, "this one was cut"),
        (b"", "no frame that this daemon knows"),
        (pb.ClientFrame(hello=pb.Hello()).SerializeToString(), "Hello was said already"),
        (
            pb.ClientFrame(slab_mapped=pb.SlabMapped(slab_id=99)).SerializeToString(),
            "slab 99 was not offered",
        ),
    ],
)
def test_malformed_frame_is_named_and_the_session_goes_on(
    daemon: RunningDaemon, data: bytes, part: str
) -> None:
    with open_session(daemon.socket) as session:
        session.send_bytes(data)
        error = session.wait_error()
        assert error.name == "BadFrame"
        assert part in error.message
        assert session.open_namespace().about == 7


def test_session_is_closed_after_eight_bad_frames(daemon: RunningDaemon) -> None:
    with open_session(daemon.socket) as session:
        for _ in range(8):
            session.send_bytes(b"\xff")
            session.wait_error()
        assert session.is_closed_by_daemon()


def test_descriptors_beside_frames_are_refused_and_closed(daemon: RunningDaemon) -> None:
    folder = Path(f"/proc/{daemon.process.pid}/fd")

    def null_count() -> int:
        """Others come and go: slabs that are populated, connections that end."""
        return sum(one.is_symlink() and os.readlink(one) == "/dev/null" for one in folder.iterdir())

    with open_session(daemon.socket) as session:
        before = null_count()
        frame = pb.ClientFrame(quiet=pb.Quiet(session_id=1))
        with open("/dev/null", "rb") as file:
            session.send(frame, [file.fileno()] * 3)
            assert "beside Hello only" in session.wait_error().message
            session.send(frame, [file.fileno()] * 30)
            assert "were cut" in session.wait_error().message
        # The answer may be there before the last of them is closed.
        eventually(lambda: null_count() == before, "they are closed", seconds=10)


@pytest.mark.parametrize(
    ("facts", "name", "part"),
    [
        ({"hash_bytes": 8}, "BadRequest", "'hash_bytes' is 8"),
        ({"model": ""}, "BadRequest", "'model' is empty"),
        ({"tenant": "me"}, "BadRequest", "leave it empty"),
        ({"shard_bytes": 32 << 20}, "BadRequest", "raise dram.slab_bytes"),
        ({"shard_count": 128}, "BadRequest", "128 shards need as many slabs"),
    ],
)
def test_impossible_namespace_is_refused_and_answers_about_it(
    daemon: RunningDaemon, facts: dict[str, object], name: str, part: str
) -> None:
    with open_session(daemon.socket) as session:
        asked = pb.OpenNamespace(spec=spec(**facts), about=42)
        session.send(pb.ClientFrame(open_namespace=asked))
        error = session.wait_error()
    assert (error.name, error.about) == (name, 42)
    assert part in error.message


def test_every_differing_fact_is_another_namespace(daemon: RunningDaemon) -> None:
    with open_session(daemon.socket) as session:
        found = [
            session.open_namespace(**facts)
            for facts in ({}, {"kv_dtype": "fp8"}, {"layout": "x"}, {"weights": "w"}, {"salt": "s"})
        ]
        assert len({one.namespace_id for one in found}) == len(found)
        assert session.open_namespace().namespace_id == found[0].namespace_id


def test_too_many_sessions_are_refused(daemon: RunningDaemon) -> None:
    with contextlib.ExitStack() as sessions:
        for _ in range(64 - used_count(daemon)):
            sessions.enter_context(open_session(daemon.socket, role=pb.ROLE_TOOL))
        with connect(daemon.socket) as session:
            session.send(pb.ClientFrame(hello=hello(session)))
            error = refused(session)
    assert error.name == "LimitExceeded"
    assert "server.sessions_max" in error.message
    assert daemon.metrics()['kvtier_frame_errors_total{error="LimitExceeded"}'] >= 1


def test_slots_of_a_lost_session_wait_until_the_process_is_quiet(daemon: RunningDaemon) -> None:
    engine = os.urandom(16)
    with RawCalls(daemon.grpc_address) as stub:
        lost = open_session(daemon.socket, engine_id=engine)
        namespace = lost.open_namespace(salt="quarantine")
        lost.map_slab()
        wait_reserved(stub, lost.token, namespace.namespace_id, 2)
        lost.close()
        with open_session(
            daemon.socket,
            engine_id=engine,
            old_session_id=lost.opened.session_id,
            old_token=lost.token,
        ) as session:
            time.sleep(0.3)
            assert quarantined(daemon) == 2
            quiet = pb.Quiet(session_id=lost.opened.session_id)
            session.send(pb.ClientFrame(quiet=quiet))
            ack = session.wait_frame("quiet_ack")[0].quiet_ack
            assert ack.session_id == lost.opened.session_id
            assert quarantined(daemon) == 0
            session.send(pb.ClientFrame(bye=pb.Bye()))


def test_a_session_its_client_never_heard_of_keeps_nobodys_slots(daemon: RunningDaemon) -> None:
    """Its answer to Hello was lost; the client cannot name it, and nobody else could end it."""
    engine = os.urandom(16)
    with connect(daemon.socket) as hasty:
        hasty.send(pb.ClientFrame(hello=hello(hasty, engine_id=engine)))
    with RawCalls(daemon.grpc_address) as stub:
        lost = open_session(daemon.socket, engine_id=engine)
        namespace = lost.open_namespace(salt="never heard of")
        lost.map_slab()
        wait_reserved(stub, lost.token, namespace.namespace_id, 2)
        lost.close()
        old = {"old_session_id": lost.opened.session_id, "old_token": lost.token}
        with open_session(daemon.socket, engine_id=engine, **old) as session:
            quiet = pb.Quiet(session_id=lost.opened.session_id)
            session.send(pb.ClientFrame(quiet=quiet))
            session.wait_frame("quiet_ack")
            assert quarantined(daemon) == 0
            session.send(pb.ClientFrame(bye=pb.Bye()))


def test_old_session_must_be_proven(daemon: RunningDaemon) -> None:
    with open_session(daemon.socket) as other, connect(daemon.socket) as session:
        forged = hello(session, old_session_id=other.opened.session_id, old_token=b"x" * 32)
        session.send(pb.ClientFrame(hello=forged))
        assert refused(session).name == "Unauthenticated"
        assert other.open_namespace().about == 7


def test_slots_of_a_dead_process_return(daemon: RunningDaemon) -> None:
    command = [sys.executable, "-c", RESERVE_AND_DIE, str(daemon.socket)]
    ended = subprocess.run(command, timeout=30)
    assert ended.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        found = daemon.metrics()
        if found['kvtier_tier_slots{state="reserved",tier="dram"}'] == 0:
            return
        time.sleep(0.05)
    raise AssertionError("slots of a dead process were not returned")


def used_count(daemon: RunningDaemon) -> int:
    """Sessions in the books; this process's own, lost in other tests, count until it ends."""
    return int(daemon.metrics()['kvtier_limit_used{limit="sessions"}'])


def quarantined(daemon: RunningDaemon) -> float:
    return daemon.metrics()['kvtier_tier_slots{state="quarantined",tier="dram"}']
