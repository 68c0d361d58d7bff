"""The only module that asks the system for the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time; the same for every process of the node."""

    def now(self) -> float:
        """Seconds of CLOCK_MONOTONIC."""
        ...

    def now_ns(self) -> int:
        """Nanoseconds of CLOCK_MONOTONIC."""
        ...


def wall_seconds() -> float:
    """Seconds of the calendar's clock, for what others read; nothing here is decided by it."""
    return time.time()


class SystemClock:
    """CLOCK_MONOTONIC of this node."""

    def now(self) -> float:
        return time.monotonic()

    def now_ns(self) -> int:
        return time.monotonic_ns()
