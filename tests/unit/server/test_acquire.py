"""Acquire as its caller sees it: when `pending` is sent, how long it waits, what is counted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from google.protobuf.message import Message

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.lane import HEAD, LANE_CALLS
from kvtier.metrics import Metrics
from kvtier.namespace import NamespaceSpec
from kvtier.server.base import Base
from kvtier.server.call_limits import CallLimits
from kvtier.server.calls import Calls, Handlers
from kvtier.server.core_loop import CoreLoop
from kvtier.server.epochs import EpochStore
from kvtier.server.leasing import Leasing
from kvtier.server.namespaces import Namespaces
from kvtier.server.security import Peer, Tokens
from kvtier.server.servicer import EngineCalls, EngineFacts
from kvtier.server.sessions import Sessions
from kvtier.server.watch import WatchHub
from kvtier.types import Cut, LeaseId, Role, SessionId, TierName
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.clock import ManualClock
from tests.support.recording_core import RecordingManager

SPEC = NamespaceSpec("test", "v1", "bfloat16", "LBHD", block_tokens=16, shard_bytes=4096)
NOW = 100.0
LEASE = LeaseId(5)
TIERS = ((TierName.DRAM, 1), (TierName.NVME, 2))
GRANTED = ins.LeaseGranted(LEASE, 3, np.arange(3, dtype=np.uint32), 120.0, Cut.MISS, 1, TIERS)


class Nobody:
    """No session that said Hello."""

    def get(self, session: SessionId) -> None:
        return None


@dataclass
class Rig:
    """The call over a core that says `pending` and, in a later turn, that the lease is ready."""

    directory: Path
    manager: RecordingManager = field(default_factory=RecordingManager)

    def __post_init__(self) -> None:
        clock, metrics = ManualClock(NOW), Metrics()
        core = CoreLoop(self.manager, clock=clock, metrics=metrics)
        namespaces = Namespaces(
            core,
            EpochStore(self.directory, iter([7]).__next__),
            slab_bytes=1 << 20,
            slab_count_max=4,
            count_max=2,
        )
        self.base = Base(core, namespaces, clock, metrics)
        self.leasing = Leasing(core, clock)
        facts = EngineFacts(generation=1, wait_seconds_max=10.0)
        nobody, unwatched = cast(Sessions, Nobody()), cast(WatchHub, None)
        self.calls = EngineCalls(self.base, nobody, unwatched, self.leasing, facts)
        self.tokens = Tokens()
        self.caller = self.tokens.issue(
            SessionId(1), Role.BOTH, by_value=False, greeted=False, now=NOW
        )

    def answer(self, event: ev.Event) -> list[ins.Instruction]:
        if not isinstance(event, ev.Acquire):
            return []
        ready = ins.LeaseReady(LEASE, GRANTED)
        asyncio.get_running_loop().call_soon(self.leasing.on_ready, ready)
        return [ins.LeasePending(LEASE, matched_count=4, memory_count=1)]

    async def request(self, *, wait_ms: int, deadline: float = 120.0) -> pb.AcquireRequest:
        opened = await self.base.namespaces.open(SPEC)
        self.manager.answer = self.answer
        return pb.AcquireRequest(
            token=self.caller.token,
            namespace_id=opened.id,
            hashes=bytes(32 * 4),
            deadline_ns=round(deadline * 1e9),
            wait_ms=wait_ms,
        )


async def sent_by(rig: Rig, request: pb.AcquireRequest) -> list[pb.AcquireResponse]:
    sent: list[pb.AcquireResponse] = []

    async def send(message: Message) -> None:
        assert isinstance(message, pb.AcquireResponse)
        sent.append(message)

    await rig.calls.acquire(request, rig.caller, send)
    return sent


def test_pending_comes_before_ready_and_blocks_are_counted_once(tmp_path: Path) -> None:
    async def test() -> None:
        rig = Rig(tmp_path)
        pending, ready = await sent_by(rig, await rig.request(wait_ms=2000))
        assert (pending.pending.matched_count, pending.pending.memory_count) == (4, 1)
        assert (ready.ready.lease_id, ready.ready.leased_count) == (LEASE, 3)
        assert [(one.tier, one.count) for one in ready.ready.tiers] == [("dram", 1), ("nvme", 2)]
        samples = rig.base.metrics.samples()
        assert samples['kvtier_asked_blocks_total{call="acquire"}'] == 4
        assert samples['kvtier_hit_blocks_total{call="acquire",tier="dram"}'] == 1
        assert samples['kvtier_hit_blocks_total{call="acquire",tier="nvme"}'] == 2
        assert samples['kvtier_miss_blocks_total{call="acquire"}'] == 1
        assert samples['kvtier_acquire_cuts_total{cut="miss"}'] == 1
        assert samples['kvtier_acquire_seconds_count{waited="yes"}'] == 1
        assert rig.manager.of(ev.Release) == []

    asyncio.run(test())


def test_answer_from_memory_is_timed_apart_from_waits(tmp_path: Path) -> None:
    async def test() -> None:
        rig = Rig(tmp_path)
        request = await rig.request(wait_ms=2000)
        rig.manager.answer = lambda _: [GRANTED]
        [ready] = await sent_by(rig, request)
        assert ready.ready.leased_count == 3
        samples = rig.base.metrics.samples()
        assert samples['kvtier_acquire_seconds_count{waited="no"}'] == 1
        assert samples['kvtier_acquire_seconds_count{waited="yes"}'] == 0

    asyncio.run(test())


@pytest.mark.parametrize(
    ("wait_ms", "deadline", "wait_until"),
    [(0, 120.0, 0.0), (2000, 120.0, 102.0), (60_000, 120.0, 110.0), (2000, 101.5, 101.5)],
)
def test_a_wait_is_bounded_by_the_lease_and_by_the_daemon(
    tmp_path: Path, wait_ms: int, deadline: float, wait_until: float
) -> None:
    async def test() -> None:
        rig = Rig(tmp_path)
        await sent_by(rig, await rig.request(wait_ms=wait_ms, deadline=deadline))
        [asked] = rig.manager.of(ev.Acquire)
        assert asked.wait_until == wait_until

    asyncio.run(test())


def test_by_the_lane_only_the_final_answer_is_sent(tmp_path: Path) -> None:
    async def test() -> None:
        rig = Rig(tmp_path)
        request = await rig.request(wait_ms=2000)
        handlers = Handlers()
        rig.calls.add_to(handlers)
        handlers.streaming = {"Acquire": rig.calls.acquire}
        answer = Calls(rig.base, rig.tokens, limits=CallLimits(calls_max=4)).lane(handlers)
        frame = await answer(LANE_CALLS.index("Acquire"), request.SerializeToString(), Peer())
        length, status = HEAD.unpack_from(frame)
        assert status == 0
        message = pb.AcquireResponse.FromString(frame[HEAD.size : HEAD.size + length])
        assert message.ready.lease_id == LEASE

    asyncio.run(test())


def test_ready_that_cannot_be_sent_ends_the_lease(tmp_path: Path) -> None:
    async def test() -> None:
        rig = Rig(tmp_path)
        request = await rig.request(wait_ms=2000)

        async def send(message: Message) -> None:
            assert isinstance(message, pb.AcquireResponse)
            if message.HasField("ready"):
                raise ConnectionResetError

        with pytest.raises(ConnectionResetError):
            await rig.calls.acquire(request, rig.caller, send)
        assert [event.leases for event in rig.manager.of(ev.Release)] == [(LEASE,)]

    asyncio.run(test())


def test_advice_reaches_the_core_and_its_answer_the_caller(tmp_path: Path) -> None:
    async def test() -> None:
        rig = Rig(tmp_path)
        namespace = (await rig.request(wait_ms=0)).namespace_id
        rig.manager.answer = lambda event: (
            [ins.PrefetchBegun(memory_count=1, promoting_count=2)]
            if isinstance(event, ev.Prefetch)
            else [ins.HintUsed(isinstance(event, ev.HintPaused))]
        )
        hashes = bytes(32 * 4)
        begun = await rig.calls.prefetch(
            pb.PrefetchRequest(namespace_id=namespace, hashes=hashes), rig.caller
        )
        assert (begun.memory_count, begun.promoting_count) == (1, 2)
        for hint, used in (
            (pb.HintRequest(paused_ms=5000), True),
            (pb.HintRequest(session_end=True), False),
            (pb.HintRequest(turn_kind="tool"), False),
        ):
            hint.namespace_id, hint.hashes = namespace, hashes
            assert (await rig.calls.hint(hint, rig.caller)).used is used
        assert len(rig.manager.of(ev.HintPaused)) == len(rig.manager.of(ev.HintSessionEnd)) == 1
        assert [one.turn_kind for one in rig.manager.of(ev.HintTurnKind)] == [1]

    asyncio.run(test())
