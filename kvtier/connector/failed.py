"""Hashes whose load failed lately: not offered again for a while, or the engine would loop."""

from __future__ import annotations


class FailedHashes:
    """Bounded memory of failed hashes, oldest out first.

    Written by the engine's thread; the control thread reads the frozen sets it hands out.
    """

    def __init__(self, *, failed_seconds: float, count_max: int) -> None:
        self._failed_seconds = failed_seconds
        self._count_max = count_max
        self._until: dict[bytes, float] = {}  # In order of time: every entry lasts equally long.
        self._frozen: frozenset[bytes] = frozenset()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, block_hash: bytes, *, now: float) -> None:
        self._until.pop(block_hash, None)
        self._until[block_hash] = now + self._failed_seconds
        if len(self._until) > self._count_max:
            del self._until[next(iter(self._until))]
        self._frozen = frozenset(self._until)

    def current(self, *, now: float) -> frozenset[bytes]:
        """The hashes not to be offered now."""
        if not self._until:
            return self._frozen
        ended = [block_hash for block_hash, until in self._until.items() if until <= now]
        if ended:
            for block_hash in ended:
                del self._until[block_hash]
            self._frozen = frozenset(self._until)
        return self._frozen

    def clear(self) -> None:
        self._until.clear()
        self._frozen = frozenset()
