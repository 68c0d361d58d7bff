"""Slices are worked off whatever happens to the caller; our own mistakes end the daemon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from kvtier.clock import SystemClock
from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import Session
from kvtier.core.listing import Listing
from kvtier.core.stats import ManagerStats
from kvtier.errors import BadRequest
from kvtier.metrics import Metrics
from kvtier.server.core_loop import TICK_SECONDS_MAX, CoreLoop
from kvtier.server.lag import SAMPLE_SECONDS, watch_lag
from kvtier.types import LeaseId, NamespaceId, PrefixMatch, SessionId, TierName
from tests.support.clock import ManualClock
from tests.support.recording_core import RecordingManager

SLICES = 3


@dataclass
class SlicingManager:
    """Answers Evict in slices, Release at once, refuses Abort, and trips over Clear."""

    seen: list[str] = field(default_factory=list)

    def handle(self, event: ev.Event, now: float) -> list[ins.Instruction]:
        if isinstance(event, ev.Evict):
            self.seen.append(f"evict {event.evicted_count}")
            if event.evicted_count + 1 < SLICES:
                rest = replace(event, evicted_count=event.evicted_count + 1)
                return [ins.RecallSlots(SessionId(1), NamespaceId(1), 1), ins.Continue(rest)]
            return [ins.Evicted(SLICES, 0)]
        if isinstance(event, ev.Release):
            self.seen.append("release")
            return [ins.LeasesEnded(1)]
        if isinstance(event, ev.Abort):
            raise BadRequest("no")
        if isinstance(event, ev.Clear):
            raise AssertionError("our own mistake")
        return []

    def match_packed(self, namespace: NamespaceId, packed: bytes) -> PrefixMatch:
        return PrefixMatch(0, 0)

    def listing(self, namespace: NamespaceId, row_first: int) -> Listing:
        return Listing(b"", b"", 0)

    def namespace_epoch(self, namespace: NamespaceId) -> int:
        return 1

    def recency(self, tier: TierName) -> ev.Slots:
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        return None

    def stats(self) -> ManagerStats:
        raise NotImplementedError

    def sessions(self) -> list[Session]:
        return []

    def check_invariants(self) -> list[str]:
        return []


EVICT = ev.Evict(NamespaceId(1), [])
RELEASE = ev.Release(SessionId(1), ())


class Done(Exception):
    """The end of a test's TaskGroup."""


def run(test: Callable[[CoreLoop, SlicingManager], Awaitable[None]]) -> SlicingManager:
    manager = SlicingManager()

    async def body() -> None:
        core = CoreLoop(manager, clock=ManualClock(), metrics=Metrics())
        async with asyncio.TaskGroup() as tasks:
            core.start(tasks, {ins.RecallSlots: lambda _: manager.seen.append("effect")})
            await test(core, manager)
            raise Done

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(body())
    (failure,) = caught.value.exceptions
    if not isinstance(failure, Done):
        raise failure
    return manager


def test_others_get_a_turn_between_slices_and_effects_run_in_order() -> None:
    async def test(core: CoreLoop, manager: SlicingManager) -> None:
        long = asyncio.create_task(core.run(EVICT))
        await asyncio.sleep(0)
        assert await core.run(RELEASE) == ins.LeasesEnded(1)
        assert await long == ins.Evicted(SLICES, 0)

    seen = run(test).seen
    assert seen.index("release") < seen.index("evict 2")
    assert [one for one in seen if one != "release"] == [
        *("evict 0", "effect", "evict 1", "effect", "evict 2")
    ]


def test_cancelled_caller_does_not_stop_the_slices_and_the_reply_is_handed_over() -> None:
    abandoned: list[ins.Reply | None] = []

    async def test(core: CoreLoop, manager: SlicingManager) -> None:
        call = asyncio.create_task(core.run(EVICT, if_abandoned=abandoned.append))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        for _ in range(10):
            await asyncio.sleep(0)

    assert "evict 2" in run(test).seen
    assert abandoned == [ins.Evicted(SLICES, 0)]


def test_refusal_reaches_the_caller_and_nothing_ends() -> None:
    async def test(core: CoreLoop, manager: SlicingManager) -> None:
        nothing = ev.Abort(SessionId(1), NamespaceId(1), ev.np.zeros(0, ev.np.uint32))
        with pytest.raises(BadRequest):
            await core.run(nothing)
        assert await core.run(RELEASE) == ins.LeasesEnded(1)

    run(test)


def test_mistake_of_ours_ends_the_daemon_even_if_the_caller_swallows_it() -> None:
    async def test(core: CoreLoop, manager: SlicingManager) -> None:
        with pytest.raises(AssertionError, match="our own"):
            await core.run(ev.Clear(NamespaceId(1), 2))
        await asyncio.sleep(3600)

    with pytest.raises(AssertionError, match="our own mistake"):
        run(test)


@pytest.mark.slow
def test_wait_that_begins_between_two_ticks_ends_when_it_should() -> None:
    clock = SystemClock()

    class Waiting(RecordingManager):
        due: float | None = None

        def next_deadline(self) -> float | None:
            return self.due

    async def body() -> None:
        ticked = asyncio.Event()
        manager = Waiting(on_event=ticked.set)
        core = CoreLoop(manager, clock=clock, metrics=Metrics())
        async with asyncio.TaskGroup() as tasks:
            core.start(tasks, {})
            await ticked.wait()
            await asyncio.sleep(0.05)  # The next tick is planned.
            manager.due = clock.now() + 0.1
            manager.answer = lambda _: [ins.LeasePending(LeaseId(1), 2, 0)]
            await core.run(ev.Acquire(SessionId(1), NamespaceId(1), [], deadline=9.0))
            manager.answer = lambda _: []
            await asyncio.sleep(0.1)
            manager.events.clear()
            await asyncio.sleep(TICK_SECONDS_MAX / 3)
            assert manager.of(ev.Tick), "nobody has looked whose wait is over"
            raise Done

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(body())
    (failure,) = caught.value.exceptions
    if not isinstance(failure, Done):
        raise failure


@pytest.mark.slow
def test_loop_that_is_held_up_is_late_by_so_much() -> None:
    metrics = Metrics()

    async def body() -> None:
        task = asyncio.create_task(watch_lag(SystemClock(), metrics))
        await asyncio.sleep(0)
        time.sleep(SAMPLE_SECONDS + 0.06)  # noqa: ASYNC251  # What no handler may do.
        await asyncio.sleep(SAMPLE_SECONDS / 2)
        task.cancel()

    asyncio.run(body())
    samples = metrics.samples()
    assert samples["kvtier_loop_lag_seconds_count"] == 1
    assert samples["kvtier_loop_lag_seconds_sum"] >= 0.05
