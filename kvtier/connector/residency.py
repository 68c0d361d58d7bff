"""Hashes that this connector believes to be resident, so that nobody offloads them again."""

from __future__ import annotations


class KnownResident:
    """Bounded, oldest out first; every entry says when it was learned.

    Belief, not truth: the daemon evicts without telling us. `learned_count` stamps a question, and
    an entry older than the question is not trusted against the answer.
    """

    def __init__(self, *, count_max: int) -> None:
        self._count_max = count_max
        self._stamps: dict[bytes, int] = {}
        self._learned_count = 0

    @property
    def learned_count(self) -> int:
        return self._learned_count

    def add(self, block_hash: bytes) -> None:
        self._learned_count += 1
        self._stamps.pop(block_hash, None)
        self._stamps[block_hash] = self._learned_count
        if len(self._stamps) > self._count_max:
            del self._stamps[next(iter(self._stamps))]

    def discard(self, block_hash: bytes) -> None:
        self._stamps.pop(block_hash, None)

    def discard_all(self, hashes: frozenset[bytes], *, until: int) -> None:
        """But for what was learned later. Costs what is known of these, as good as."""
        for block_hash in self._stamps.keys() & hashes:
            if self._stamps[block_hash] <= until:
                del self._stamps[block_hash]

    def is_known(self, block_hash: bytes, *, since: int) -> bool:
        """Whether it was learned after `since`; 0 trusts everything."""
        return self._stamps.get(block_hash, -1) > since

    def clear(self) -> None:
        self._stamps.clear()
