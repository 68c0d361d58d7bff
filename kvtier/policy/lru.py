"""Tail-first LRU: of all leaves, the one used longest ago goes first.

On prefix trees this is the honest base (docs/decisions): a chain is used as a whole, so its blocks
share one time of use, and only its tail is a leaf.

Times of use are a column (8 bytes a block). Candidates are a heap of (time, row) over leaves only;
an entry whose time is not the block's any more is put back with the right one when it surfaces, so
a touch costs no heap operation.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Sequence

import numpy as np

from kvtier.policy.eviction import (
    Blocks,
    ChainOf,
    Evictable,
    Keys,
    MayEvict,
    Rows,
    Victims,
    alone,
)

_NEVER = -np.inf
_GONE = np.nan


class LruPolicy:
    """Invariant: every leaf that was announced and not removed has an entry in the heap."""

    def __init__(self, blocks: Blocks | None = None) -> None:
        """Asks nothing of the blocks."""
        self._used_at = np.full(0, _GONE)
        self._in_heap = np.zeros(0, dtype=np.bool_)
        # Has an entry for NEVER: pushed once, however often the sessions of a prefix end.
        self._in_front = np.zeros(0, dtype=np.bool_)
        self._heap: list[tuple[float, int]] = []

    def on_request(self, rows: Rows, absent: Keys, now: float, tenant: int = 0) -> None:
        self.on_touch(rows, now)

    def on_insert(self, rows: Rows, now: float) -> None:
        self._make_room(int(rows.max()) + 1 if len(rows) else 0)
        self._used_at[rows] = now

    def on_touch(self, rows: Rows, now: float) -> None:
        self._used_at[rows] = now

    def on_leaf(self, row: int) -> None:
        if not self._in_heap.item(row):
            self._in_heap[row] = True
            self._push(self._used_at.item(row), row)

    def on_remove(self, rows: Sequence[int]) -> None:
        self._used_at[rows] = _GONE

    def on_session_end(self, rows: Rows) -> bool:
        """Make the prefix the next victim, tail first.

        Blocks that another session uses too are no leaves before that one's blocks are gone, and
        its next use gives them a new time.
        """
        self._used_at[rows] = _NEVER
        fresh = rows[self._in_heap[rows] & ~self._in_front[rows]]
        for row in fresh.tolist():
            self._push(_NEVER, row)  # The old entry will be found stale.
        return True

    def nominate(
        self, count: int, may_evict: MayEvict, chain_of: ChainOf = alone
    ) -> Generator[Sequence[int], None, None]:
        kept: list[tuple[float, int]] = []
        try:
            yield from self._leaves(count, may_evict, chain_of, kept)
        finally:
            for used_at, row in kept:
                if math.isnan(self._used_at.item(row)):
                    self._in_heap[row] = False
                else:
                    self._push(used_at, row)

    def _leaves(
        self,
        count: int,
        may_evict: MayEvict,
        chain_of: ChainOf,
        kept: list[tuple[float, int]],
    ) -> Victims:
        """Adds to `kept` what it has taken out of the heap and does not know to be gone."""
        seen: set[int] = set()
        while self._heap and count > 0:
            used_at, row = heapq.heappop(self._heap)
            if used_at == _NEVER:
                self._in_front[row] = False
            if row in seen:
                continue
            actual = self._used_at.item(row)
            if math.isnan(actual):
                self._in_heap[row] = False
                continue
            if actual != used_at:
                self._push(actual, row)
                continue
            verdict = may_evict(row)
            if verdict is Evictable.INNER:
                self._in_heap[row] = False
                continue
            seen.add(row)
            kept.append((used_at, row))
            if verdict is Evictable.YES:
                chain = self._alike(chain_of(row, count), used_at)
                count -= len(chain)
                yield chain

    def _alike(self, chain: Sequence[int], used_at: float) -> Sequence[int]:
        """How much of it goes before every other leaf: what was used with the first one."""
        first = self._heap[0] if self._heap else None
        for place, row in enumerate(chain):
            if place and (
                self._used_at.item(row) != used_at
                or self._in_heap.item(row)
                or (first is not None and first < (used_at, row))
            ):
                return chain[:place]
        return chain

    def _push(self, used_at: float, row: int) -> None:
        heapq.heappush(self._heap, (used_at, row))
        if used_at == _NEVER:
            self._in_front[row] = True

    def _make_room(self, count: int) -> None:
        old = len(self._used_at)
        if count <= old:
            return
        new = max(count, old + old // 8, 1024)
        # Resized where they lie: copying them at a million blocks would take too long. So nobody
        # may keep a view of them.
        self._used_at.resize(new, refcheck=False)
        self._used_at[old:] = _GONE
        self._in_heap.resize(new, refcheck=False)
        self._in_front.resize(new, refcheck=False)
