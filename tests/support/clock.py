"""Time that moves only when a test says so."""

from __future__ import annotations


class ManualClock:
    """A kvtier.clock.Clock whose time a test sets."""

    def __init__(self, now: float = 1_000.0) -> None:
        self._now_ns = round(now * 1e9)

    def now(self) -> float:
        return self._now_ns / 1e9

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass; time never goes back, since CLOCK_MONOTONIC does not."""
        assert seconds >= 0, f"CLOCK_MONOTONIC cannot go back by {-seconds} s"
        self._now_ns += round(seconds * 1e9)
