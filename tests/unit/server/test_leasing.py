"""A lease is told to its caller, or it ends: whatever becomes of the wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.errors import Unauthenticated
from kvtier.metrics import Metrics
from kvtier.server.core_loop import CoreLoop
from kvtier.server.leasing import Leasing
from kvtier.types import Cut, LeaseId, NamespaceId, SessionId, TierName
from tests.support.clock import ManualClock
from tests.support.recording_core import RecordingManager

LEASE = LeaseId(5)
ASKED = ev.Acquire(SessionId(1), NamespaceId(1), [], deadline=200.0, wait_until=150.0)
PENDING = ins.LeasePending(LEASE, matched_count=9, memory_count=4)
GRANTED = ins.LeaseGranted(
    LEASE, 9, np.arange(9, dtype=np.uint32), 200.0, Cut.NONE, 1, ((TierName.NVME, 9),)
)


class Rig:
    """A core whose Acquire is pending, and what its caller does about it."""

    def __init__(self) -> None:
        self.manager = RecordingManager(answer=self.answer)
        self.clock = ManualClock(100.0)
        self.core = CoreLoop(self.manager, clock=self.clock, metrics=Metrics())
        self.leasing = Leasing(self.core, self.clock)

    def answer(self, event: ev.Event) -> list[ins.Instruction]:
        return [PENDING] if isinstance(event, ev.Acquire) else [ins.LeasesEnded(1)]

    @property
    def released(self) -> list[LeaseId]:
        return [lease for event in self.manager.of(ev.Release) for lease in event.leases]

    async def asked(
        self, told: Callable[[ins.LeasePending], Awaitable[None]]
    ) -> asyncio.Task[ins.LeaseGranted | None]:
        """A call that waits for its grant."""
        call = asyncio.create_task(self.leasing.acquire(ASKED, told))
        await asyncio.sleep(0)
        return call


async def heard(_: ins.LeasePending) -> None:
    return


def test_grant_that_comes_later_reaches_who_was_told_that_it_is_pending() -> None:
    async def test() -> None:
        rig, told = Rig(), []

        async def tell(reply: ins.LeasePending) -> None:
            told.append(reply)

        call = await rig.asked(tell)
        await asyncio.sleep(0)
        assert told == [PENDING]
        rig.leasing.on_ready(ins.LeaseReady(LEASE, GRANTED))
        assert await call is GRANTED
        assert rig.released == []
        assert rig.leasing.waiting_count == 0

    asyncio.run(test())


def test_grant_that_overtakes_its_pending_is_not_lost() -> None:
    """The reply of a later slice wakes the caller a turn of the loop after it is known."""

    async def test() -> None:
        rig = Rig()

        def answer(event: ev.Event) -> list[ins.Instruction]:
            assert isinstance(event, ev.Acquire)
            if not event.done_count:
                return [ins.Continue(replace(event, done_count=1))]
            ready = ins.LeaseReady(LEASE, GRANTED)
            asyncio.get_running_loop().call_soon(rig.leasing.on_ready, ready)
            return [PENDING]

        rig.manager.answer = answer
        async with asyncio.TaskGroup() as tasks:
            rig.core._tasks = tasks
            assert await rig.leasing.acquire(ASKED) is GRANTED

    asyncio.run(asyncio.wait_for(test(), 10))


def test_cancelled_wait_ends_the_lease() -> None:
    async def test() -> None:
        rig = Rig()
        call = await rig.asked(heard)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert rig.released == [LEASE]
        rig.leasing.on_ready(ins.LeaseReady(LEASE, GRANTED))  # Changes nothing any more.
        assert rig.leasing.waiting_count == 0

    asyncio.run(test())


def test_wait_that_is_cancelled_in_the_turn_of_its_grant_ends_the_lease() -> None:
    async def test() -> None:
        rig = Rig()
        call = await rig.asked(heard)
        rig.leasing.on_ready(ins.LeaseReady(LEASE, GRANTED))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert rig.released == [LEASE]

    asyncio.run(test())


def test_pending_that_cannot_be_sent_ends_the_lease() -> None:
    async def test() -> None:
        rig = Rig()

        async def fail(_: ins.LeasePending) -> None:
            raise ConnectionResetError

        call = await rig.asked(fail)
        with pytest.raises(ConnectionResetError):
            await call
        assert rig.released == [LEASE]

    asyncio.run(test())


def test_wait_ends_at_the_deadline_when_the_core_says_nothing() -> None:
    """Such as when the engine died: its leases are over, and nobody is told so."""

    async def test() -> None:
        rig = Rig()
        rig.clock.advance(99.99)
        assert await rig.leasing.acquire(ASKED, heard) is None
        assert rig.released == [LEASE]
        assert rig.leasing.waiting_count == 0

    asyncio.run(test())


def test_session_that_is_over_needs_no_release() -> None:
    async def test() -> None:
        rig = Rig()
        call = await rig.asked(heard)

        def refuse(_: ev.Event) -> list[ins.Instruction]:
            raise Unauthenticated("over")

        rig.manager.answer = refuse
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(test())


def test_grants_that_nobody_waits_for_are_not_kept() -> None:
    async def test() -> None:
        rig = Rig()
        rig.leasing.on_ready(ins.LeaseReady(LEASE, GRANTED))
        assert rig.leasing._early == {}

    asyncio.run(test())
