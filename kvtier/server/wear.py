"""How much was written to the disks lately; pure."""

from __future__ import annotations

from collections import deque

DAY_SECONDS = 86_400.0
# What is told is at most this much too old; a day has 96 of them.
_STEP_SECONDS = 900.0


class WearMeter:
    """Bytes written, with a memory of one day."""

    def __init__(self) -> None:
        self.written_bytes = 0  # Since start.
        self._steps: deque[tuple[int, int]] = deque()  # (number of the step, bytes), ascending.

    def note(self, written_bytes: int, *, now: float) -> None:
        self.written_bytes += written_bytes
        step = int(now // _STEP_SECONDS)
        if self._steps and self._steps[-1][0] == step:
            written_bytes += self._steps.pop()[1]
        self._steps.append((step, written_bytes))
        self._forget(now)

    def day_bytes(self, *, now: float) -> int:
        """Written in the last 24 hours, and up to a quarter of an hour before."""
        self._forget(now)
        return sum(written_bytes for _, written_bytes in self._steps)

    def _forget(self, now: float) -> None:
        oldest = int((now - DAY_SECONDS) // _STEP_SECONDS)
        while self._steps and self._steps[0][0] < oldest:
            self._steps.popleft()
