"""The only caller of the block manager: hands it events, runs its instructions in order.

Invariants: between `handle` and the last instruction of a slice nothing else runs; a chain of
slices is worked off to its end whatever happens to the call that began it.

An error that is not a `KVTierError` is our own mistake. It ends the daemon: `wait_failed` raises it
inside the daemon's TaskGroup, also when it came up where somebody would have swallowed it (a gRPC
handler, a callback of the loop).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvtier.clock import Clock
from kvtier.core.engines import Session
from kvtier.core.events import Event, Slots, Tick
from kvtier.core.instructions import Continue, Instruction, LeasePending, Reply
from kvtier.core.listing import Listing
from kvtier.core.locating import Locator
from kvtier.core.stats import ManagerStats
from kvtier.errors import KVTierError
from kvtier.metrics import Metrics
from kvtier.server.lag import watch_lag
from kvtier.types import LeaseId, NamespaceId, PrefixMatch, TierName

TICK_SECONDS_MAX = 1.0
TICK_SECONDS_MIN = 0.02  # However many deadlines fall due, no more than 50 ticks a second.
SLICE_SECONDS_MAX = 0.005
# A call takes about this many turns of the loop from its bytes to its answer. With one turn between
# slices a match waited for as many slices of somebody's long chain. An idle turn costs some 10 µs.
TURNS_BETWEEN_SLICES = 5


class Manager(Protocol):
    """The part of core.BlockManager that the shell uses."""

    def handle(self, event: Event, now: float) -> list[Instruction]: ...
    def match_packed(self, namespace: NamespaceId, packed: bytes) -> PrefixMatch: ...
    def listing(self, namespace: NamespaceId, row_first: int) -> Listing: ...
    def namespace_epoch(self, namespace: NamespaceId) -> int: ...
    def lease_namespace(self, lease: LeaseId) -> NamespaceId | None: ...
    def next_deadline(self) -> float | None: ...
    def recency(self, tier: TierName) -> Slots: ...
    def stats(self) -> ManagerStats: ...
    def sessions(self) -> list[Session]: ...
    @property
    def locator(self) -> Locator: ...
    def check_invariants(self) -> list[str]: ...


Effects = Mapping[type, Callable[..., None]]
"""Instruction class -> what the shell does about it; event class -> who is told that it comes. Set
once by `CoreLoop.start`."""


class CoreLoop:
    """Lives on the event loop; no method may be called from another thread."""

    def __init__(self, manager: Manager, *, clock: Clock, metrics: Metrics) -> None:
        self._manager = manager
        self._clock = clock
        self._metrics = metrics
        self._effects: Effects = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._replan = asyncio.Event()
        self.ticked_at = clock.now()
        self.match_packed = manager.match_packed  # Bound once: the hot path.
        self.namespace_epoch = manager.namespace_epoch
        self.listing = manager.listing
        self.recency = manager.recency
        self.stats = manager.stats
        self.sessions = manager.sessions
        self.check_invariants = manager.check_invariants

    @property
    def locator(self) -> Locator:
        return self._manager.locator

    def lease_namespace(self, lease: LeaseId) -> NamespaceId | None:
        """None for a lease that there is not."""
        return self._manager.lease_namespace(lease)

    def start(self, tasks: asyncio.TaskGroup, effects: Effects) -> None:
        self._tasks = tasks
        self._effects = effects
        tasks.create_task(self._tick_forever(), name="tick")
        tasks.create_task(watch_lag(self._clock, self._metrics), name="lag")
        tasks.create_task(self.wait_failed(), name="failure")

    async def run(
        self, event: Event, *, if_abandoned: Callable[[Reply | None], None] | None = None
    ) -> Reply | None:
        """Work the event off, all its slices, and return its reply.

        A caller that is cancelled does not stop the slices; `if_abandoned` then gets the reply.
        """
        reply, rest = self._step(event)
        if rest is None:
            return reply
        task = self._continue_in_background(rest)
        if reply is not None:
            return reply  # Only tidying up is left.
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            if if_abandoned is not None:
                task.add_done_callback(lambda done: _hand_over(done, if_abandoned))
            raise
        if isinstance(result, KVTierError):
            raise result
        return result

    def post(self, event: Event) -> Reply | None:
        """Work the first slice off now and the others in the background.

        Returns the reply if the first slice had it. Raises KVTierError when the event is refused.
        """
        reply, rest = self._step(event)
        if rest is not None:
            self._continue_in_background(rest)
        self._replan.set()  # Such as a process that died: its grace time may end soon.
        return reply

    def spawn(self, work: Callable[[], None]) -> None:
        """Run `work` as a callback whose mistakes end the daemon."""
        try:
            work()
        except Exception as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """End the daemon with this error; the first one counts."""
        if self._failure is None:
            self._failure = error
            self._failed.set()

    async def wait_failed(self) -> None:
        await self._failed.wait()
        assert self._failure is not None, "woken without a failure"
        raise self._failure

    # --------------------------------------------------------------------------------- helpers

    def _step(self, event: Event) -> tuple[Reply | None, Event | None]:
        """One slice: the reply, if this slice had it, and the event to continue with."""
        assert self._failure is None, "an event after the core had failed"
        now = self._clock.now()
        reply: Reply | None = None
        rest: Event | None = None
        tell = self._effects.get(type(event))
        if tell is not None:
            tell(event)
        try:
            for instruction in self._manager.handle(event, now):
                if isinstance(instruction, Continue):
                    assert rest is None, "two events to continue with"
                    rest = instruction.event
                    continue
                effect = self._effects.get(type(instruction))
                if effect is not None:
                    effect(instruction)
                else:
                    assert isinstance(instruction, Reply), f"nobody runs {instruction!r}"
                    assert reply is None, "two replies to one event"
                    reply = instruction
                    if isinstance(reply, LeasePending):
                        self._replan.set()  # Its wait may be over before the tick that is planned.
        except KVTierError:
            raise
        except Exception as error:
            self.fail(error)
            raise
        self._metrics.calls.note_slice(self._clock.now() - now)
        return reply, rest

    def _continue_in_background(self, rest: Event) -> asyncio.Task[Reply | KVTierError | None]:
        assert self._tasks is not None, "the core loop was not started"
        return self._tasks.create_task(self._continue(rest))

    async def _continue(self, event: Event) -> Reply | KVTierError | None:
        rest: Event | None = event
        reply: Reply | None = None
        while rest is not None:  # Ends: the manager works off a bounded part each time.
            for _ in range(TURNS_BETWEEN_SLICES):
                await asyncio.sleep(0)
            try:
                answer, rest = self._step(rest)
            except KVTierError as error:
                return error
            if answer is not None:
                assert reply is None, "two replies to one event"
                reply = answer
        return reply

    async def _tick_forever(self) -> None:
        """Until the daemon ends."""
        while self._failure is None:
            self.post(Tick())
            self.ticked_at = self._clock.now()
            await self._wait_tick(self.ticked_at + TICK_SECONDS_MIN)

    async def _wait_tick(self, earliest: float) -> None:
        """Until a deadline is due or the longest pause is over."""
        latest = self._clock.now() + TICK_SECONDS_MAX
        while True:  # Ends: `latest` comes.
            self._replan.clear()
            due = min(latest, max(earliest, self._manager.next_deadline() or latest))
            seconds = due - self._clock.now()
            if seconds <= 0:
                return
            try:
                async with asyncio.timeout(seconds):
                    await self._replan.wait()
            except TimeoutError:
                return


def _hand_over(
    done: asyncio.Task[Reply | KVTierError | None], to: Callable[[Reply | None], None]
) -> None:
    if done.cancelled() or done.exception() is not None:
        return
    result = done.result()
    if not isinstance(result, KVTierError):
        to(result)


def both(one: Callable[[Any], None], other: Callable[[Any], None]) -> Callable[[Any], None]:
    """An effect of two: the one, then the other."""

    def effect(instruction: Any) -> None:
        one(instruction)
        other(instruction)

    return effect
