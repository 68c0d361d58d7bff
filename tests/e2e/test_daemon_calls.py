"""The gRPC service over bare stubs: what is refused by name, and what engines rely on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import grpc
import pytest

from kvtier.types import PROTOCOL_VERSION, CommitOutcome, Cut
from kvtier.v1 import kvtier_pb2 as pb
from kvtier.v1.kvtier_pb2_grpc import KVTierStub
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.raw_client import (
    HASH_BYTES,
    RawCalls,
    RawSession,
    chain,
    open_session,
    spec,
    wait_reserved,
)

PAYLOAD_BYTES = 4096


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    options = {
        "lease.grace_seconds": "0.1",
        "grpc.tcp": "127.0.0.1:0",
        "server.watch_events_max": "16",
        "dram.policy": "curves",  # The default is what the other daemons have.
    }
    # A slab for each test's namespace.
    with running_daemon(dram_bytes="192MiB", slab_bytes="2MiB", options=options) as running:
        running.wait_populated()
        yield running


@dataclass
class Engine:
    """One process that is scheduler and worker, in a namespace of its own."""

    session: RawSession
    stub: KVTierStub
    namespace_id: int
    epoch: int

    @property
    def names(self) -> dict[str, object]:
        return {"token": self.session.token, "namespace_id": self.namespace_id}

    def store(self, hashes: list[bytes], parent: bytes = b"") -> list[int]:
        """Reserve, fill and commit; the outcomes."""
        reserved = wait_reserved(self.stub, self.session.token, self.namespace_id, len(hashes))
        assert len(reserved.slots) == len(hashes)
        for slot, one in zip(reserved.slots, hashes, strict=True):
            self.session.slot_view(slot)[:] = payload(one)
        return self.commit(hashes, list(reserved.slots), parent)

    def commit(self, hashes: list[bytes], slots: list[int], parent: bytes = b"") -> list[int]:
        asked = pb.CommitRequest(
            **self.names, hashes=b"".join(hashes), slots=slots, parent=parent, epoch=self.epoch
        )
        return list(self.stub.Commit(asked, timeout=5).outcomes)

    def matched_count(self, hashes: list[bytes]) -> int:
        asked = pb.MatchRequest(**self.names, hashes=b"".join(hashes))
        return int(self.stub.Match(asked, timeout=5).matched_count)

    def acquire(self, hashes: list[bytes], seconds: float = 5.0, **more: object) -> pb.AcquireReady:
        asked = pb.AcquireRequest(
            **self.names,
            hashes=b"".join(hashes),
            deadline_ns=time.monotonic_ns() + int(seconds * 1e9),
            **more,
        )
        (answer,) = list(self.stub.Acquire(asked, timeout=5))
        return answer.ready


def payload(block: bytes) -> bytes:
    return (block * (PAYLOAD_BYTES // len(block)))[:PAYLOAD_BYTES]


@pytest.fixture
def engine(daemon: RunningDaemon) -> Iterator[Engine]:
    with (
        open_session(daemon.socket, engine_id=os.urandom(16)) as session,
        RawCalls(daemon.grpc_address) as stub,
    ):
        namespace = session.open_namespace(salt=os.urandom(8).hex())
        session.map_slab()
        yield Engine(session, stub, namespace.namespace_id, namespace.epoch)
        session.send(pb.ClientFrame(bye=pb.Bye()))
        assert session.is_closed_by_daemon()


def refusal(
    call: Callable[..., Iterable[object]], *arguments: object
) -> tuple[grpc.StatusCode, str]:
    """Status and the error's name."""
    try:
        list(call(*arguments, timeout=5))
    except grpc.RpcError as error:
        return error.code(), error.details().partition(":")[0]
    raise AssertionError("the call was not refused")


def test_committed_blocks_match_at_once_and_are_leased_with_their_bytes(engine: Engine) -> None:
    hashes = chain(5)
    assert engine.store(hashes) == [CommitOutcome.READY] * 5
    assert engine.matched_count([*hashes, b"?" * HASH_BYTES]) == 5
    ready = engine.acquire([*hashes, b"?" * HASH_BYTES], skip_count=2)
    assert (ready.leased_count, len(ready.slots), ready.cut) == (5, 3, Cut.MISS)
    for slot, one in zip(ready.slots, hashes[2:], strict=True):
        assert bytes(engine.session.slot_view(slot)) == payload(one)
    release = pb.ReleaseRequest(token=engine.session.token, lease_ids=[ready.lease_id, 999])
    assert engine.stub.Release(release, timeout=5).ended_count == 1
    assert engine.stub.Release(release, timeout=5).ended_count == 0


def test_gap_ends_the_match(engine: Engine) -> None:
    hashes = chain(4)
    engine.store(hashes[:2])
    assert engine.matched_count(hashes) == 2
    assert engine.matched_count([b"x" * HASH_BYTES, *hashes[1:]]) == 0


def test_double_commit_is_refused_and_changes_nothing(engine: Engine) -> None:
    reserved = wait_reserved(engine.stub, engine.session.token, engine.namespace_id, 1)
    slots = list(reserved.slots)
    assert engine.commit(chain(1), slots) == [CommitOutcome.READY]
    code, name = refusal(engine.stub.Commit, commit_of(engine, chain(1, seed=9), slots))
    assert (code, name) == (grpc.StatusCode.INVALID_ARGUMENT, "NotReserved")
    assert engine.matched_count(chain(1)) == 1
    assert engine.matched_count(chain(1, seed=9)) == 0


def test_foreign_slot_is_refused(daemon: RunningDaemon, engine: Engine) -> None:
    with open_session(daemon.socket, engine_id=os.urandom(16)) as other:
        reserved = wait_reserved(engine.stub, engine.session.token, engine.namespace_id, 1)
        stolen = commit_of(engine, chain(1), list(reserved.slots))
        stolen.token = other.token
        assert refusal(engine.stub.Commit, stolen)[1] == "NotReserved"
        assert engine.matched_count(chain(1)) == 0
        abort = pb.AbortRequest(**engine.names, slots=reserved.slots)
        assert engine.stub.Abort(abort, timeout=5).freed_count == 1
        other.send(pb.ClientFrame(bye=pb.Bye()))


def test_block_without_resident_parent_is_refused_by_outcome(engine: Engine) -> None:
    assert engine.store(chain(1), parent=b"p" * HASH_BYTES) == [CommitOutcome.NO_PARENT]


def test_duplicate_is_present(engine: Engine) -> None:
    engine.store(chain(1))
    assert engine.store(chain(1)) == [CommitOutcome.PRESENT]


def test_commit_begun_before_a_clear_is_void(engine: Engine) -> None:
    engine.store(chain(2))
    reserved = wait_reserved(engine.stub, engine.session.token, engine.namespace_id, 1)
    cleared = engine.stub.Clear(pb.ClearRequest(**engine.names), timeout=5)
    assert cleared.voided_count == 2
    assert cleared.epoch != engine.epoch
    assert engine.commit(chain(1, seed=3), list(reserved.slots)) == [CommitOutcome.VOID]
    assert engine.matched_count(chain(2)) == 0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"token": b""}, "Unauthenticated"),
        ({"token": b"x" * 32}, "Unauthenticated"),
        ({"namespace_id": 999}, "UnknownNamespace"),
        ({"hashes": b"x" * (HASH_BYTES + 1)}, "BadRequest"),
        ({"hashes": b"x" * ((1 << 20) + HASH_BYTES)}, "BadRequest"),
    ],
)
def test_wrong_match_is_refused_by_name(
    engine: Engine, changes: dict[str, object], name: str
) -> None:
    asked = {**engine.names, "hashes": b"", **changes}
    assert refusal(engine.stub.Match, pb.MatchRequest(**asked))[1] == name


def test_a_call_that_names_more_than_any_session_can_hold_is_refused(engine: Engine) -> None:
    """Working millions of numbers off would keep the daemon from everybody for seconds."""
    slots = pb.AbortRequest(**engine.names, slots=range(70_000))
    leases = pb.ReleaseRequest(token=engine.session.token, lease_ids=range(5000))
    for call, request in ((engine.stub.Abort, slots), (engine.stub.Release, leases)):
        with pytest.raises(grpc.RpcError) as refused:
            call(request, timeout=5)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert " at most " in refused.value.details()


def test_bytes_that_are_no_message_are_refused_by_name(
    daemon: RunningDaemon, engine: Engine
) -> None:
    with grpc.insecure_channel(daemon.grpc_address) as channel:
        for method in ("Match", "Commit", "Stats"):
            call = channel.unary_unary(f"/kvtier.v1.KVTier/{method}")
            code, name = refusal(call, b"\xff\xff\xff")
            assert (code, name) == (grpc.StatusCode.INVALID_ARGUMENT, "BadRequest")
        put = channel.stream_unary("/kvtier.v1.KVTier/Put")
        assert refusal(put, iter([b"\xff\xff"]))[1] == "BadRequest"
        assert refusal(put, iter([]))[1] == "Unauthenticated"


def test_message_over_4_mib_is_refused_and_the_daemon_goes_on(engine: Engine) -> None:
    asked = pb.MatchRequest(**engine.names, hashes=bytes(5 << 20))
    assert refusal(engine.stub.Match, asked)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert engine.matched_count(chain(1)) == 0


@pytest.mark.parametrize("role", [pb.ROLE_TOOL, pb.ROLE_WORKER])
def test_only_schedulers_hold_slots_and_leases(
    daemon: RunningDaemon, engine: Engine, role: int
) -> None:
    with open_session(daemon.socket, role=role, engine_id=os.urandom(16)) as session:
        names = {"token": session.token, "namespace_id": engine.namespace_id}
        reserve = pb.ReserveRequest(**names, count=1)
        assert refusal(engine.stub.Reserve, reserve)[1] == "Forbidden"
        assert refusal(engine.stub.Acquire, pb.AcquireRequest(**names))[1] == "Forbidden"
        session.send(pb.ClientFrame(bye=pb.Bye()))


def test_token_of_an_ended_session_stops_working(daemon: RunningDaemon, engine: Engine) -> None:
    with open_session(daemon.socket, role=pb.ROLE_TOOL) as session:
        stats = pb.StatsRequest(token=session.token)
        engine.stub.Stats(stats, timeout=5)
        session.send(pb.ClientFrame(bye=pb.Bye()))
        assert session.is_closed_by_daemon()
        assert refusal(engine.stub.Stats, stats)[1] == "Unauthenticated"


def test_deadline_beyond_the_longest_lease_is_refused(engine: Engine) -> None:
    asked = pb.AcquireRequest(**engine.names, deadline_ns=time.monotonic_ns() + 10**12)
    assert refusal(engine.stub.Acquire, asked)[1] == "BadRequest"
    assert engine.acquire(chain(1), seconds=-1).cut == Cut.DEADLINE


def put_pieces(engine: Engine, blocks: list[bytes], parent: bytes = b"") -> Iterator[pb.PutRequest]:
    for place, one in enumerate(blocks):
        data = payload(one)
        for offset in range(0, PAYLOAD_BYTES, 1000):
            yield pb.PutRequest(
                **(engine.names if place == 0 and offset == 0 else {}),
                parent=parent if place == 0 and offset == 0 else b"",
                hash=one,
                offset=offset,
                data=data[offset : offset + 1000],
            )


def get_blocks(engine: Engine, hashes: list[bytes]) -> dict[int, bytes]:
    asked = pb.GetRequest(**engine.names, hashes=b"".join(hashes))
    found: dict[int, bytes] = {}
    for piece in engine.stub.Get(asked, timeout=10):
        assert piece.offset == len(found.get(piece.index, b""))
        found[piece.index] = found.get(piece.index, b"") + piece.data
    return found


def test_put_blocks_are_got_back_up_to_the_first_gap(engine: Engine) -> None:
    hashes = chain(100)
    answer = engine.stub.Put(put_pieces(engine, hashes), timeout=30)
    assert (answer.ready_count, answer.present_count, answer.refused_count) == (100, 0, 0)
    again = engine.stub.Put(put_pieces(engine, hashes[:2]), timeout=30)
    assert (again.ready_count, again.present_count) == (0, 2)
    found = get_blocks(engine, [*hashes, b"?" * HASH_BYTES])
    assert found == {place: payload(one) for place, one in enumerate(hashes)}
    assert get_blocks(engine, [b"?" * HASH_BYTES]) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1},
        {"data": b""},
        {"data": bytes(300_000)},
        {"data": bytes(PAYLOAD_BYTES + 1)},
        {"hash": b"x"},
        {"parent": b"x"},
    ],
)
def test_wrong_piece_is_refused_and_holds_no_slot(
    daemon: RunningDaemon, engine: Engine, change: dict[str, object]
) -> None:
    piece = {**engine.names, "hash": chain(1)[0], "offset": 0, "data": b"x", **change}
    assert refusal(engine.stub.Put, iter([pb.PutRequest(**piece)]))[1] == "BadRequest"
    assert reserved_count(daemon) == 0


def test_put_that_is_cut_off_holds_no_slot(daemon: RunningDaemon, engine: Engine) -> None:
    pieces = list(put_pieces(engine, chain(1)))[:2]
    assert refusal(engine.stub.Put, iter(pieces))[1] == "BadRequest"
    stalled = threading.Event()

    def stalling() -> Iterator[pb.PutRequest]:
        yield from pieces
        stalled.wait(10)

    call = engine.stub.Put.future(stalling())
    wait_until(lambda: reserved_count(daemon) == 1)
    call.cancel()
    wait_until(lambda: reserved_count(daemon) == 0)
    stalled.set()
    assert engine.matched_count(chain(1)) == 0


def test_put_that_a_clear_overtakes_ends_void(daemon: RunningDaemon, engine: Engine) -> None:
    first, *rest = put_pieces(engine, chain(1))
    cleared = threading.Event()

    def pieces() -> Iterator[pb.PutRequest]:
        yield first
        cleared.wait(10)
        yield from rest

    call = engine.stub.Put.future(pieces())
    wait_until(lambda: reserved_count(daemon) == 1)
    engine.stub.Clear(pb.ClearRequest(**engine.names), timeout=5)
    cleared.set()
    answer = call.result(timeout=10)
    assert (answer.ready_count, answer.refused_count) == (0, 1)
    assert engine.matched_count(chain(1)) == 0
    assert reserved_count(daemon) == 0


def test_greet_session_works_by_value_and_may_hold_nothing(daemon: RunningDaemon) -> None:
    with RawCalls(daemon.ready["tcp"]) as stub:
        greeted = stub.Greet(
            pb.GreetRequest(protocol=PROTOCOL_VERSION, spec=spec(salt="greet")), timeout=5
        )
        names = {"token": greeted.token, "namespace_id": greeted.namespace_id}
        pieces = [pb.PutRequest(**names, hash=chain(1)[0], data=payload(chain(1)[0]))]
        assert stub.Put(iter(pieces), timeout=5).ready_count == 1
        match = pb.MatchRequest(**names, hashes=chain(1)[0])
        assert stub.Match(match, timeout=5).matched_count == 1
        assert refusal(stub.Reserve, pb.ReserveRequest(**names, count=1))[1] == "Forbidden"
        assert refusal(stub.Clear, pb.ClearRequest(**names))[1] == "Forbidden"
        wrong = pb.GreetRequest(protocol=PROTOCOL_VERSION + 2)
        assert refusal(stub.Greet, wrong)[0] is grpc.StatusCode.FAILED_PRECONDITION


def test_watcher_sees_blocks_with_tokens_and_a_slow_one_is_told_its_loss(engine: Engine) -> None:
    call = engine.stub.Watch(pb.WatchRequest(**engine.names))
    time.sleep(0.2)
    hashes = chain(2)
    reserved = wait_reserved(engine.stub, engine.session.token, engine.namespace_id, 2)
    asked = commit_of(engine, hashes, list(reserved.slots))
    asked.token_ids.extend(range(32))
    engine.stub.Commit(asked, timeout=5)
    first = next(call)
    assert first.sequence == 1
    assert first.stored.hashes == b"".join(hashes)
    assert list(first.stored.token_ids) == list(range(32))
    engine.stub.Clear(pb.ClearRequest(**engine.names), timeout=5)
    assert next(call).WhichOneof("event") == "cleared"
    call.cancel()


def test_pin_outlives_the_administrator_and_blocks_eviction(
    daemon: RunningDaemon, engine: Engine
) -> None:
    hashes = chain(3)
    engine.store(hashes)
    packed = b"".join(hashes)
    with open_session(daemon.socket, role=pb.ROLE_TOOL) as admin:
        names = {"token": admin.token, "namespace_id": engine.namespace_id}
        pinned = engine.stub.Pin(pb.PinRequest(**names, hashes=packed, hold_ms=60_000), timeout=5)
        assert pinned.pinned_count == 3
        admin.send(pb.ClientFrame(bye=pb.Bye()))
        assert admin.is_closed_by_daemon()
    evict = pb.EvictRequest(**engine.names, hashes=packed)
    kept = engine.stub.Evict(evict, timeout=5)
    assert (kept.evicted_count, kept.kept_count) == (0, 3)
    release = pb.ReleaseRequest(token=engine.session.token, lease_ids=[pinned.lease_id])
    assert engine.stub.Release(release, timeout=5).ended_count == 1
    deadline = time.monotonic() + 5  # Their checksums, too, hold them for a moment.
    while not (evicted_count := engine.stub.Evict(evict, timeout=5).evicted_count):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert evicted_count == 3


def test_hits_and_misses_add_up_and_stats_equal_metrics(
    daemon: RunningDaemon, engine: Engine
) -> None:
    engine.store(chain(3))
    engine.matched_count(chain(5))
    engine.acquire(chain(4))
    answer = engine.stub.Stats(pb.StatsRequest(token=engine.session.token), timeout=5)
    metrics = daemon.metrics()
    for call in ("match", "acquire", "get"):
        asked = metrics[f'kvtier_asked_blocks_total{{call="{call}"}}']
        hits = sum(
            v for k, v in metrics.items() if k.startswith(f'kvtier_hit_blocks_total{{call="{call}"')
        )
        assert asked == hits + metrics[f'kvtier_miss_blocks_total{{call="{call}"}}']
    moving = ["seconds", "kvtier_calls", "core", "file_descriptors", "bucket", '"calls"']
    moving.append("checksum")  # Computed in the background.
    steady = {k: v for k, v in answer.counters.items() if not any(one in k for one in moving)}
    assert len(steady) > 50
    assert steady == {k: metrics[k] for k in steady}


def test_drain_refuses_new_holds_and_can_be_taken_back(engine: Engine) -> None:
    engine.store(chain(1))
    token = engine.session.token
    assert engine.stub.Drain(pb.DrainRequest(token=token), timeout=5).draining
    try:
        reserve = pb.ReserveRequest(**engine.names, count=1)
        code, name = refusal(engine.stub.Reserve, reserve)
        assert (code, name) == (grpc.StatusCode.UNAVAILABLE, "Draining")
        assert engine.acquire(chain(1)).cut == Cut.DRAINING
    finally:
        resumed = engine.stub.Drain(pb.DrainRequest(token=token, resume=True), timeout=5)
    assert not resumed.draining
    assert engine.acquire(chain(1)).leased_count == 1


def test_invariants_hold_at_the_end(engine: Engine) -> None:
    checked = engine.stub.Check(pb.CheckRequest(token=engine.session.token), timeout=30)
    assert list(checked.violations) == []


def commit_of(engine: Engine, hashes: list[bytes], slots: list[int]) -> pb.CommitRequest:
    return pb.CommitRequest(
        **engine.names, hashes=b"".join(hashes), slots=slots, epoch=engine.epoch
    )


def reserved_count(daemon: RunningDaemon) -> float:
    return daemon.metrics()['kvtier_tier_slots{state="reserved",tier="dram"}']


def wait_until(is_true: Callable[[], bool], timeout_seconds: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not is_true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
