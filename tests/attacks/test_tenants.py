"""Several tenants in one daemon: who may connect, whose token counts where, and what each sees."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import pytest

from kvtier.client import Client
from kvtier.paths import grpc_socket_path
from kvtier.types import Role
from kvtier.v1 import kvtier_pb2 as pb
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
from tests.support.tenant_daemon import (
    Tenants,
    lane_call,
    matched,
    offload,
    own_uid,
    running_tenants,
)
from tests.support.users import OTHER_UID, as_user, needs_root

HASHES = chain(4)
SHARED = "shared-model"
SESSIONS_MAX = 48

CALL_AS = """
import os, sys
import grpc
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.raw_client import RawCalls
uid, address, token = int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])
os.setgroups([])
os.setresuid(uid, uid, uid)
with RawCalls(address) as stub:
    try:
        stub.Stats(pb.StatsRequest(token=token), timeout=10)
        print("OK")
    except grpc.RpcError as error:
        print(error.code().name, error.details())
"""


@pytest.fixture(scope="module")
def tenants() -> Iterator[Tenants]:
    me = str(own_uid())
    both = {"shared_models": SHARED}
    named = {
        "red": {**both},
        "blue": {**both},
        "listed": {"uids": f"{me},{OTHER_UID}"},
        "strangers": {"uids": str(OTHER_UID + 1)},
        "reading": {"readers": me},
        "working": {"uids": me},
    }
    options = {
        "server.hello_seconds": "0.5",
        "server.sessions_max": str(SESSIONS_MAX),
        "lease.grace_seconds": "0.1",
    }
    with running_tenants(named, options) as running:
        running.daemon.wait_populated()
        running.open_to_all()
        yield running


def refused(stub_call: object, **facts: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        stub_call(timeout=10, **facts)  # type: ignore[operator]
    error = caught.value
    return error.code(), error.details()


def test_equal_prompts_of_two_tenants_share_nothing_and_a_forged_namespace_is_none(
    tenants: Tenants,
) -> None:
    with (
        open_session(tenants.socket("red")) as red,
        open_session(tenants.socket("blue")) as blue,
    ):
        of_red, of_blue = red.open_namespace(), blue.open_namespace()
        assert of_red.fingerprint != of_blue.fingerprint
        red.map_slab()
        offload(red, of_red.namespace_id, HASHES, 1)
        assert matched(red, of_red.namespace_id, HASHES) == 4
        assert matched(blue, of_blue.namespace_id, HASHES) == 0
        forged = {"namespace_id": of_red.namespace_id}
        packed = b"".join(HASHES)
        with RawCalls(blue.opened.grpc_address) as stub:
            calls = [
                (stub.Match, pb.MatchRequest(token=blue.token, hashes=packed, **forged)),
                (stub.Reserve, pb.ReserveRequest(token=blue.token, count=1, **forged)),
                (stub.Commit, pb.CommitRequest(token=blue.token, **forged)),
                (stub.Abort, pb.AbortRequest(token=blue.token, slots=[0], **forged)),
                (stub.Prefetch, pb.PrefetchRequest(token=blue.token, hashes=packed, **forged)),
                (stub.Hint, pb.HintRequest(token=blue.token, session_end=True, **forged)),
                (stub.Evict, pb.EvictRequest(token=blue.token, hashes=packed, **forged)),
                (stub.Pin, pb.PinRequest(token=blue.token, hashes=packed, hold_ms=9, **forged)),
                (stub.Clear, pb.ClearRequest(token=blue.token, **forged)),
                (stub.List, pb.ListRequest(token=blue.token, **forged)),
            ]
            for call, request in calls:
                code, text = refused(call, request=request)
                assert code is grpc.StatusCode.NOT_FOUND, text
            streams = [
                stub.Acquire(pb.AcquireRequest(token=blue.token, hashes=packed, **forged)),
                stub.Get(pb.GetRequest(token=blue.token, hashes=packed, **forged)),
                stub.Watch(pb.WatchRequest(token=blue.token, **forged)),
            ]
            piece = pb.PutRequest(token=blue.token, hash=HASHES[0], **forged)
            code, _ = refused(stub.Put, request_iterator=iter([piece]))
            assert code is grpc.StatusCode.NOT_FOUND
            for stream in streams:
                with pytest.raises(grpc.RpcError) as caught:
                    next(stream)
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            stats = stub.Stats(pb.StatsRequest(token=blue.token), timeout=10)
            found = stub.Explain(pb.ExplainRequest(token=blue.token, hash=HASHES[0]), timeout=10)
        assert [one.namespace_id for one in stats.namespaces] == [of_blue.namespace_id]
        assert [one.session_id for one in stats.sessions] == [blue.opened.session_id]
        assert stats.tiers[0].ready_count == 0
        of_whom = of_red.fingerprint.hex()[:8]
        assert not any(of_whom in name for name in stats.counters)
        assert of_whom not in str(found)
        assert all(one.namespace_id != of_red.namespace_id for one in found.places)
        assert matched(red, of_red.namespace_id, HASHES) == 4, "nothing was lost"


def test_the_operator_sees_the_counts_of_all_and_the_blocks_of_none(tenants: Tenants) -> None:
    with (
        open_session(tenants.socket("red")) as red,
        open_session(tenants.daemon.socket, role=pb.ROLE_TOOL, shards=[]) as operator,
    ):
        of_red = red.open_namespace()
        with RawCalls(operator.opened.grpc_address) as stub:
            stats = stub.Stats(pb.StatsRequest(token=operator.token), timeout=10)
            told = {one.namespace_id: one.tenant for one in stats.namespaces}
            assert told[of_red.namespace_id] == "red"
            request = pb.ListRequest(token=operator.token, namespace_id=of_red.namespace_id)
            assert refused(stub.List, request=request)[0] is grpc.StatusCode.NOT_FOUND
            assert not stub.Check(pb.CheckRequest(token=operator.token), timeout=10).violations
        with RawCalls(red.opened.grpc_address) as stub:
            for call, request in (
                (stub.Drain, pb.DrainRequest(token=red.token)),
                (stub.Check, pb.CheckRequest(token=red.token)),
            ):
                code, text = refused(call, request=request)
                assert code is grpc.StatusCode.PERMISSION_DENIED
                assert "connect to server.socket" in text


def test_a_shared_model_is_one_namespace_for_those_who_name_it(tenants: Tenants) -> None:
    hashes = chain(3, seed=5)
    with (
        open_session(tenants.socket("red")) as red,
        open_session(tenants.socket("blue")) as blue,
        open_session(tenants.socket("listed")) as other,
    ):
        ours = red.open_namespace(model=SHARED, tenant="red")
        theirs = blue.open_namespace(model=SHARED)
        assert ours.fingerprint == theirs.fingerprint
        assert other.open_namespace(model=SHARED).fingerprint != ours.fingerprint
        red.map_slab()
        offload(red, ours.namespace_id, hashes, 2)
        assert matched(blue, theirs.namespace_id, hashes) == 3


def test_a_token_counts_at_its_own_socket_only_and_its_theft_is_logged_once(
    tenants: Tenants,
) -> None:
    with (
        open_session(tenants.socket("red")) as red,
        open_session(tenants.socket("blue")) as blue,
    ):
        before = len(tenants.lines("this token is of a session of another socket"))
        with RawCalls(blue.opened.grpc_address) as stub:
            code, text = refused(stub.Stats, request=pb.StatsRequest(token=red.token))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert "another socket" in text
        code, answer = lane_call(tenants.socket("blue"), "Match", pb.MatchRequest(token=red.token))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert b"another socket" in answer
        assert len(tenants.lines("this token is of a session of another socket")) == before + 2
        thief = connect(tenants.socket("blue"))
        claim = hello(thief, old_session_id=red.opened.session_id, old_token=red.token)
        thief.send(pb.ClientFrame(hello=claim))
        assert thief.wait_error().name == "Unauthenticated"
        thief.close()
        assert matched(red, red.open_namespace().namespace_id, HASHES) >= 0, "it goes on"


@needs_root
def test_a_token_counts_for_its_own_user_only(tenants: Tenants) -> None:
    path = tenants.socket("listed")
    with open_session(path) as mine:
        lane_call(path, "Match", pb.MatchRequest(token=mine.token))
        with as_user(OTHER_UID):
            code, answer = lane_call(path, "Match", pb.MatchRequest(token=mine.token))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert b"another user's session" in answer
        words = [f"unix:{grpc_socket_path(path)}", mine.token.hex()]
        done = subprocess.run(
            [sys.executable, "-c", CALL_AS, str(OTHER_UID), *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert "another user's session" in done.stdout, done.stdout + done.stderr
        with RawCalls(words[0]) as stub:
            stub.Stats(pb.StatsRequest(token=mine.token), timeout=10)


def test_who_is_in_no_list_gets_no_word_in_and_is_logged_once(tenants: Tenants) -> None:
    path = tenants.socket("strangers")
    before = len(tenants.lines("connection refused"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.settimeout(10)
        raw.connect(str(path))
        session = RawSession(raw)
        frame, _ = session.receive() or pytest.fail("closed without a word")
        assert frame.WhichOneof("frame") == "error", "not even a Welcome"
        assert frame.error.name == "Forbidden"
        assert session.is_closed_by_daemon()
    with pytest.raises(ConnectionError):
        lane_call(path, "Match", pb.MatchRequest())
    with RawCalls(f"unix:{grpc_socket_path(path)}") as stub:
        request = pb.GreetRequest(protocol=1)
        assert refused(stub.Greet, request=request)[0] is grpc.StatusCode.UNAVAILABLE
    lines = tenants.lines("connection refused")[before:]
    assert len(lines) >= 3  # gRPC tries again by itself.
    assert all("strangers" in line and f"user {own_uid()}" in line for line in lines)


@pytest.mark.parametrize("name", ["reading", "working"])
def test_a_call_beyond_the_rights_of_its_user_is_refused(tenants: Tenants, name: str) -> None:
    path = tenants.socket(name)
    with Client(tenants.socket("working"), role=Role.TOOL) as client:
        assert client.wait_connected(10)
    with open_session(path, role=pb.ROLE_TOOL, shards=[]) as session:
        if name == "working":
            of = session.open_namespace().namespace_id
        else:
            session.send(pb.ClientFrame(open_namespace=pb.OpenNamespace(spec=spec(), about=1)))
            assert session.wait_error().name == "Forbidden"
            of = 1
        token = session.token
        with RawCalls(session.opened.grpc_address) as stub:
            stub.Stats(pb.StatsRequest(token=token), timeout=10)
            beyond = [
                (stub.Clear, pb.ClearRequest(token=token, namespace_id=of)),
                (stub.Evict, pb.EvictRequest(token=token, namespace_id=of)),
                (stub.Pin, pb.PinRequest(token=token, namespace_id=of)),
                (stub.Drain, pb.DrainRequest(token=token)),
            ]
            if name == "reading":
                beyond += [
                    (stub.Prefetch, pb.PrefetchRequest(token=token, namespace_id=of)),
                    (stub.Hint, pb.HintRequest(token=token, namespace_id=of)),
                    (stub.Release, pb.ReleaseRequest(token=token)),
                ]
            for call, request in beyond:
                code, text = refused(call, request=request)
                assert code is grpc.StatusCode.PERMISSION_DENIED, text


def test_a_reader_is_no_engine(tenants: Tenants) -> None:
    with connect(tenants.socket("reading")) as session:
        session.send(pb.ClientFrame(hello=hello(session)))
        assert "a reader is no engine" in session.wait_error().message


def test_another_tenants_lease_pin_slot_and_engine_are_out_of_reach(tenants: Tenants) -> None:
    hashes = chain(4, seed=9)
    with (
        open_session(tenants.socket("red"), engine_id=b"R" * 16) as red,
        open_session(tenants.socket("blue"), engine_id=b"R" * 16) as blue,
    ):
        of_red, of_blue = red.open_namespace(salt="out"), blue.open_namespace(salt="out")
        red_slab, blue_slab = red.map_slab(), blue.map_slab()
        assert red_slab.slab_id != blue_slab.slab_id
        offload(red, of_red.namespace_id, hashes, 3)
        with RawCalls(red.opened.grpc_address) as stub:
            deadline = time.monotonic_ns() + 20 * 10**9
            request = pb.AcquireRequest(
                token=red.token,
                namespace_id=of_red.namespace_id,
                hashes=b"".join(hashes),
                deadline_ns=deadline,
            )
            leased = list(stub.Acquire(request, timeout=10))[-1].ready
            pinned = stub.Pin(
                pb.PinRequest(
                    token=red.token,
                    namespace_id=of_red.namespace_id,
                    hashes=b"".join(hashes),
                    hold_ms=20_000,
                ),
                timeout=10,
            )
            assert (leased.leased_count, pinned.pinned_count) == (4, 4)
        with RawCalls(blue.opened.grpc_address) as stub:
            numbers = [leased.lease_id, pinned.lease_id]
            request = pb.ReleaseRequest(token=blue.token, lease_ids=numbers)
            assert stub.Release(request, timeout=10).ended_count == 0
            foreign = range(red_slab.slot_first, red_slab.slot_first + 4)
            request = pb.AbortRequest(
                token=blue.token, namespace_id=of_blue.namespace_id, slots=foreign
            )
            assert refused(stub.Abort, request=request)[0] is grpc.StatusCode.INVALID_ARGUMENT
            request = pb.CommitRequest(
                token=blue.token,
                namespace_id=of_blue.namespace_id,
                hashes=b"".join(hashes),
                slots=foreign,
                epoch=of_blue.epoch,
            )
            assert refused(stub.Commit, request=request)[0] is grpc.StatusCode.INVALID_ARGUMENT
        mapped = pb.SlabMapped(slab_id=red_slab.slab_id, shard=0)
        blue.send(pb.ClientFrame(slab_mapped=mapped))
        assert "was not offered" in blue.wait_error().message
        with RawCalls(red.opened.grpc_address) as stub:
            request = pb.ReleaseRequest(token=red.token, lease_ids=numbers)
            assert stub.Release(request, timeout=10).ended_count == 2, "nothing was lost"


def test_a_client_that_says_nothing_is_closed_and_logged_once(tenants: Tenants) -> None:
    before = len(tenants.lines("no Hello within"))
    with connect(tenants.socket("red")) as slow, open_session(tenants.socket("red")) as quick:
        assert slow.wait_error().name == "BadFrame"
        assert matched(quick, quick.open_namespace().namespace_id, HASHES) >= 0
    eventually(lambda: len(tenants.lines("no Hello within")) == before + 1, "it is logged")


def test_sessions_of_one_tenant_use_up_its_own_room_alone(tenants: Tenants) -> None:
    held = []
    try:
        for _ in range(SESSIONS_MAX + 1):
            session = connect(tenants.socket("red"))
            held.append(session)
            greeting = hello(session, role=pb.ROLE_TOOL, shards=[], engine_id=os.urandom(16))
            session.send(pb.ClientFrame(hello=greeting))
            frame, _ = session.receive() or pytest.fail("closed without a word")
            if frame.WhichOneof("frame") == "error":
                break
        assert frame.error.name == "LimitExceeded"
        assert "server.sessions_max" in frame.error.message
        with open_session(tenants.socket("blue"), role=pb.ROLE_TOOL, shards=[]) as blue:
            blue.open_namespace()
    finally:
        for session in held:
            session.close()
