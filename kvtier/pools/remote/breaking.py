"""A remote engine behind breakers: calls that would only cost time are not made at all.

One breaker for what reads and one for what writes: an engine that is full, or read only for us,
goes on serving what it has. A breaker that is open answers OFF at once. Each change of state is
one line in the log; troubles and skipped calls are counted by reason.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvtier.clock import Clock
from kvtier.pools.remote.breaker import Breaker, BreakerSettings, BreakerState
from kvtier.pools.remote.engine import (
    TROUBLES,
    Emptied,
    Health,
    Pace,
    RemoteEngine,
    RemoteKey,
    RemoteOutcome,
    Reply,
    Value,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
OFF = RemoteOutcome.OFF


class BreakingEngine:
    """Implements `RemoteEngine` over another one."""

    def __init__(
        self,
        engine: RemoteEngine,
        *,
        clock: Clock,
        jitter: Callable[[], float],
        settings: BreakerSettings = BreakerSettings(),
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._reading = Breaker(settings, jitter)
        self._writing = Breaker(settings, jitter)
        self._foreign: Counter[str] = Counter()

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def pace(self) -> Pace:
        return self._engine.pace

    @property
    def reading_state(self) -> BreakerState:
        return self._reading.state

    @property
    def writing_state(self) -> BreakerState:
        return self._writing.state

    @property
    def troubles(self) -> Counter[str]:
        """Calls that ended in trouble, and those with values not believed, by reason."""
        return self._reading.troubles + self._writing.troubles + self._foreign

    @property
    def skipped_count(self) -> int:
        return self._reading.skipped_count + self._writing.skipped_count

    def note_wrong_value(self, reason: str) -> None:
        """What was got is not what was asked for: an engine that does so often is left alone."""
        ticket = self._reading.ticket
        self._reading.on_trouble(ticket, reason, now=self._clock.now())
        self._tell(self._reading, "read")

    def note_foreign_value(self, reason: str) -> None:
        """What was got is no fault of the engine's: it is only counted."""
        self._foreign[reason] += 1

    async def put(
        self, values: Sequence[tuple[RemoteKey, Value]], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        return await self._guarded(
            self._writing,
            lambda: self._engine.put(values, timeout_seconds=timeout_seconds),
            [OFF] * len(values),
            trouble_of,
        )

    async def get(
        self, keys: Sequence[RemoteKey], *, value_bytes_max: int, timeout_seconds: float
    ) -> list[Reply]:
        return await self._guarded(
            self._reading,
            lambda: self._engine.get(
                keys, value_bytes_max=value_bytes_max, timeout_seconds=timeout_seconds
            ),
            [Reply(OFF)] * len(keys),
            lambda replies: trouble_of([reply.outcome for reply in replies]),
        )

    async def exists(
        self, keys: Sequence[RemoteKey], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        return await self._guarded(
            self._reading,
            lambda: self._engine.exists(keys, timeout_seconds=timeout_seconds),
            [OFF] * len(keys),
            trouble_of,
        )

    async def delete(
        self, keys: Sequence[RemoteKey], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        return await self._guarded(
            self._writing,
            lambda: self._engine.delete(keys, timeout_seconds=timeout_seconds),
            [OFF] * len(keys),
            trouble_of,
        )

    async def delete_under(
        self, folder: RemoteKey, *, kept: Sequence[RemoteKey], timeout_seconds: float
    ) -> Emptied:
        """Asked whatever the breakers say, and they are not told: it may take its whole time."""
        return await self._engine.delete_under(folder, kept=kept, timeout_seconds=timeout_seconds)

    async def read_record(self, key: RemoteKey, *, timeout_seconds: float) -> Reply:
        return await self._guarded(
            self._reading,
            lambda: self._engine.read_record(key, timeout_seconds=timeout_seconds),
            Reply(OFF),
            lambda reply: trouble_of([reply.outcome]),
        )

    async def replace_record(
        self, key: RemoteKey, *, expected: bytes | None, value: bytes, timeout_seconds: float
    ) -> RemoteOutcome:
        return await self._guarded(
            self._writing,
            lambda: self._engine.replace_record(
                key, expected=expected, value=value, timeout_seconds=timeout_seconds
            ),
            OFF,
            lambda outcome: trouble_of([outcome]),
        )

    async def health(self, *, timeout_seconds: float) -> Health:
        """Asked whatever the breakers say, and they are not told: this is for people."""
        return await self._engine.health(timeout_seconds=timeout_seconds)

    async def close(self) -> None:
        await self._engine.close()

    async def _guarded(
        self,
        breaker: Breaker,
        call: Callable[[], Awaitable[T]],
        skipped: T,
        trouble: Callable[[T], str],
    ) -> T:
        side = "read" if breaker is self._reading else "write"
        ticket = breaker.begin(now=self._clock.now())
        self._tell(breaker, side)
        if ticket is None:
            return skipped
        try:
            found = await call()
        except BaseException:
            breaker.on_given_up(ticket)
            raise
        if reason := trouble(found):
            breaker.on_trouble(ticket, reason, now=self._clock.now())
        else:
            breaker.on_success(ticket)
        self._tell(breaker, side)
        return found

    def _tell(self, breaker: Breaker, side: str) -> None:
        for change in breaker.take_changes():
            level = logging.WARNING if change.after is BreakerState.OPEN else logging.INFO
            log.log(
                level,
                "remote breaker changed",
                extra={
                    "engine": self.name,
                    "side": side,
                    "before": change.before.value,
                    "after": change.after.value,
                    "reason": change.reason or None,
                    "open_seconds": round(change.open_seconds, 1) or None,
                },
            )


def trouble_of(outcomes: Sequence[RemoteOutcome]) -> str:
    """Why the batch was worse than none; empty when it was worth its time.

    A cluster of which one node is dead still is. A member that took the whole deadline is not.
    """
    if RemoteOutcome.TIMED_OUT in outcomes:
        return RemoteOutcome.TIMED_OUT.value
    troubles = [outcome for outcome in outcomes if outcome in TROUBLES]
    return troubles[0].value if outcomes and len(troubles) == len(outcomes) else ""
