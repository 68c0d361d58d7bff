"""How long to wait before the next attempt; pure, chance is an argument."""

from __future__ import annotations

import random


class Backoff:
    """Delays that double from `seconds_min` to `seconds_max`, each cut by up to a half at random.

    The jitter keeps the engines of a node from coming back in step after a restart.
    """

    def __init__(self, seconds_min: float, seconds_max: float, jitter: random.Random) -> None:
        assert 0 < seconds_min <= seconds_max
        self._seconds_min = seconds_min
        self._seconds_max = seconds_max
        self._jitter = jitter
        self._seconds = seconds_min

    def next_seconds(self) -> float:
        """The delay to wait now: between half of the current step and all of it."""
        step = self._seconds
        self._seconds = min(2 * step, self._seconds_max)
        return step * (1.0 - 0.5 * self._jitter.random())

    def reset(self) -> None:
        """An attempt succeeded: start small again."""
        self._seconds = self._seconds_min
