"""Acquire to its final answer, which may come once blocks have been promoted to memory.

Invariant: a lease ends that nobody was told of. Whoever waits for one is cancelled, or stops
waiting at the lease's deadline; then the lease is released, whether it was granted by then or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from kvtier.clock import Clock
from kvtier.core.events import Acquire, Release
from kvtier.core.instructions import LeaseGranted, LeasePending, LeaseReady, Reply
from kvtier.errors import KVTierError
from kvtier.server.core_loop import CoreLoop
from kvtier.types import LeaseId, SessionId

# How long Get and Pin, whose callers cannot say, wait for blocks of a lower tier, all of one call:
# less than clients wait for the answer, so that a disk that stalls is a miss and not an error.
GET_WAIT_SECONDS = 8.0
PIN_WAIT_SECONDS = 1.5

TellPending = Callable[[LeasePending], Awaitable[None]]


class Leasing:
    """Lives on the event loop."""

    def __init__(self, core: CoreLoop, clock: Clock) -> None:
        self._core = core
        self._clock = clock
        self._waits: dict[LeaseId, asyncio.Future[LeaseGranted]] = {}
        # Grants that came before their caller had a turn to wait for them, while there are calls
        # that this can happen to.
        self._early: dict[LeaseId, LeaseGranted] = {}
        self._asking_count = 0

    @property
    def waiting_count(self) -> int:
        """Calls that wait for a promotion."""
        return len(self._waits)

    def on_ready(self, ready: LeaseReady) -> None:
        """Whoever has stopped waiting has released the lease."""
        wait = self._waits.get(ready.lease)
        if wait is None:
            if self._asking_count:
                self._early[ready.lease] = ready.granted
        elif not wait.done():
            wait.set_result(ready.granted)

    async def acquire(
        self, event: Acquire, tell_pending: TellPending | None = None
    ) -> LeaseGranted | None:
        """None when the lease ended before it was granted, such as with its engine.

        `tell_pending` is called if there is something to wait for.
        """
        reply = await self._ask(event)
        if isinstance(reply, LeaseGranted):
            return reply
        try:
            if tell_pending is not None:
                await tell_pending(reply)
            granted = await self._wait(reply.lease, event.deadline)
        except BaseException:
            self.release(event.session, reply)
            raise
        finally:
            del self._waits[reply.lease]
        if granted is None:
            self.release(event.session, reply)
        return granted

    def release(self, session: SessionId, reply: Reply | None) -> None:
        """End the lease that nobody was told of."""
        assert isinstance(reply, LeaseGranted | LeasePending), "Acquire has two kinds of reply"
        if reply.lease is None:
            return
        try:
            self._core.post(Release(session, (reply.lease,)))
        except KVTierError:
            return  # The session is over: its leases end by the rules for that.

    async def _ask(self, event: Acquire) -> LeaseGranted | LeasePending:
        self._asking_count += 1
        try:
            reply = await self._core.run(event, if_abandoned=partial(self.release, event.session))
            assert isinstance(reply, LeaseGranted | LeasePending), "Acquire has two kinds of reply"
            if isinstance(reply, LeasePending):
                wait = self._waits[reply.lease] = asyncio.get_running_loop().create_future()
                if (granted := self._early.pop(reply.lease, None)) is not None:
                    wait.set_result(granted)
            return reply
        finally:
            self._asking_count -= 1
            if not self._asking_count:
                self._early.clear()

    async def _wait(self, lease: LeaseId, deadline: float) -> LeaseGranted | None:
        """Until the core says how it ended; that does not come for an engine that is over."""
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock.now())):
                return await self._waits[lease]
        except TimeoutError:
            return None
