"""Memory that is slower than it is: copies held back to a bandwidth and a latency.

For machines without CXL memory: a second pool in ordinary memory whose copies take as long as they
would take there. Whatever uses this says so: the tier is called emulated in statistics and logs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.io.copy import copy_batch
from kvtier.memory import Bytes

# A wait ends late by what the kernel's timer, its scheduler and the GIL take; the next copy may
# begin as much earlier on the emulated tier's books, or a stream of small copies would be slower
# than asked. Beyond this a burst would show.
_CATCH_UP_SECONDS = 0.010


@dataclass(frozen=True, slots=True)
class EmulatedSpeed:
    """What a tier is to be like: all copies together, and what each access costs besides."""

    bytes_per_second: float
    latency_seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e9:g} GB/s, {self.latency_seconds * 1e9:g} ns"


class TokenBucket:
    """The books of an emulated tier: when it would be done. Pure; one thread at a time.

    Copies follow each other, however many threads ask: the bandwidth is that of the tier. Nothing
    is put by while the tier is idle, so that a lone block takes as long as one in a stream.
    """

    def __init__(self, speed: EmulatedSpeed) -> None:
        self._speed = speed
        self._free_at = 0.0
        self._credit_seconds = 0.0

    def take(self, length_bytes: int, *, now: float) -> float:
        """When these bytes, asked for now, have gone through."""
        begins_at = max(self._free_at, now - self._credit_seconds)
        self._credit_seconds = 0.0
        self._free_at = begins_at + length_bytes / self._speed.bytes_per_second
        return self._free_at

    def give_credit(self, late_seconds: float) -> None:
        """A wait ended so much later than it should have."""
        self._credit_seconds = min(max(0.0, late_seconds), _CATCH_UP_SECONDS)


@dataclass(frozen=True, slots=True)
class ThrottleStats:
    """What was copied so far."""

    copied_bytes: int
    access_count: int
    busy_seconds: float  # Sum over the calls, which may overlap.
    late_count: int  # Calls for which this machine is too slow: the tier is slower than asked.


class Throttle:
    """Copies at an emulated tier's speed; any thread."""

    def __init__(
        self,
        speed: EmulatedSpeed,
        now: Callable[[], float],
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self.speed = speed
        self._now = now
        self._wait = threading.Event().wait if wait is None else wait
        self._lock = threading.Lock()  # Guards the rest.
        self._bucket = TokenBucket(speed)
        self._stats = ThrottleStats(0, 0, 0.0, 0)

    def stats(self) -> ThrottleStats:
        with self._lock:
            return self._stats

    def copy_batch(self, targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
        """As `kvtier.io.copy.copy_batch`; each pair is one access."""
        began_at = self._now()
        length_bytes = sum(source.nbytes for source in sources)
        with self._lock:
            due_at = self._bucket.take(length_bytes, now=began_at)
        due_at += self.speed.latency_seconds * len(sources)
        copy_batch(targets, sources)
        is_late = self._now() > due_at
        while (left_seconds := due_at - self._now()) > 0:
            self._wait(left_seconds)
        ended_at = self._now()
        with self._lock:
            if not is_late:
                self._bucket.give_credit(ended_at - due_at)
            before = self._stats
            self._stats = ThrottleStats(
                copied_bytes=before.copied_bytes + length_bytes,
                access_count=before.access_count + len(sources),
                busy_seconds=before.busy_seconds + ended_at - began_at,
                late_count=before.late_count + is_late,
            )
