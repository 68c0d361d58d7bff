"""How many bytes may be written to a tier below memory: a token bucket, so that drives outlive
their warranty.

An hour's share may be saved up. What fills an empty pool is free: it is written once in the life of
the pool.
"""

from __future__ import annotations

HOUR_SECONDS = 3600.0


class WriteBudget:
    """Pure: told the time, in seconds."""

    def __init__(self, *, bytes_per_hour: float) -> None:
        self._bytes_per_second = bytes_per_hour / HOUR_SECONDS
        self._burst_bytes = self.bytes_per_hour = bytes_per_hour
        self._left_bytes = bytes_per_hour
        self._free_bytes = 0.0
        self._told_at: float | None = None

    @property
    def left_bytes(self) -> float:
        return self._free_bytes + self._left_bytes

    def fill(self, free_bytes: float) -> None:
        """The pool has so much room that nothing was ever written to."""
        self._free_bytes = free_bytes

    def tell(self, now: float) -> float:
        """What time has earned beyond what may be saved up."""
        earned = 0.0
        if self._told_at is not None:
            earned = (now - self._told_at) * self._bytes_per_second
        self._told_at = now
        return self.add(earned)

    def add(self, length_bytes: float) -> float:
        """So many more may be written; those beyond what may be saved up."""
        room = self._burst_bytes - self._left_bytes
        self._left_bytes += min(room, length_bytes)
        return max(0.0, length_bytes - room)

    def may_write(self) -> bool:
        return self.left_bytes > 0

    def has_spare(self) -> bool:
        """Whether blocks may be written that nobody has used a second time yet."""
        return self._free_bytes > 0 or self._left_bytes > self._burst_bytes / 2

    @property
    def share(self) -> float:
        """Of an hour's bytes, how much is left; more than 1 while writing is free."""
        if self._free_bytes > 0 or not self._burst_bytes:
            return 2.0
        return self._left_bytes / self._burst_bytes

    def take(self, length_bytes: int) -> None:
        """May end below 0 by one batch; that is paid back before the next."""
        free = min(self._free_bytes, length_bytes)
        self._free_bytes -= free
        self._left_bytes -= length_bytes - free
