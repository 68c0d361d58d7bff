"""Tail-first LRU: of all leaves, the one used longest ago goes first.

On prefix trees this is the honest base (docs/decisions): a chain is used as a whole, so its blocks
share one time of use, and only its tail is a leaf.

Times of use are a column (8 bytes a block). Candidates are a heap of (time, row) over leaves only;
an entry whose time is not the block's any more is put back with the right one when it surfaces, so
a touch costs no heap operation.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.policy.eviction import Evictable

Rows = npt.NDArray[np.int32]

_NEVER = -np.inf
_GONE = np.nan


class LruPolicy:
    """Invariant: every leaf that was announced and not removed has an entry in the heap."""

    def __init__(self) -> None:
        self._used_at = np.full(0, _GONE)
        self._in_heap = np.zeros(0, dtype=np.bool_)
        self._heap: list[tuple[float, int]] = []

    def on_insert(self, rows: Rows, now: float) -> None:
        self._make_room(int(rows.max()) + 1 if len(rows) else 0)
        self._used_at[rows] = now

    def on_touch(self, rows: Rows, now: float) -> None:
        self._used_at[rows] = now

    def on_leaf(self, row: int) -> None:
        if not self._in_heap[row]:
            self._in_heap[row] = True
            heapq.heappush(self._heap, (float(self._used_at[row]), row))

    def on_remove(self, rows: Sequence[int]) -> None:
        self._used_at[rows] = _GONE

    def on_session_end(self, rows: Rows) -> bool:
        """Make the prefix the next victim, tail first.

        Blocks that another session uses too are no leaves before that one's blocks are gone, and
        its next use gives them a new time.
        """
        self._used_at[rows] = _NEVER
        for row in rows.tolist():
            if self._in_heap[row]:
                heapq.heappush(self._heap, (_NEVER, row))  # The old entry will be found stale.
        return True

    def nominate(self, count: int, may_evict: Callable[[int], Evictable]) -> list[int]:
        chosen: list[int] = []
        kept: list[tuple[float, int]] = []
        seen: set[int] = set()
        while self._heap and len(chosen) < count:
            used_at, row = heapq.heappop(self._heap)
            if row in seen:
                continue
            actual = float(self._used_at[row])
            if np.isnan(actual):
                self._in_heap[row] = False
            elif actual != used_at:
                heapq.heappush(self._heap, (actual, row))
            else:
                seen.add(row)
                verdict = may_evict(row)
                if verdict is Evictable.INNER:
                    self._in_heap[row] = False
                    continue
                kept.append((used_at, row))
                if verdict is Evictable.YES:
                    chosen.append(row)
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return chosen

    def _make_room(self, count: int) -> None:
        old = len(self._used_at)
        if count <= old:
            return
        new = max(count, old + old // 8, 1024)
        used_at = np.full(new, _GONE)
        used_at[:old] = self._used_at
        in_heap = np.zeros(new, dtype=np.bool_)
        in_heap[:old] = self._in_heap
        self._used_at, self._in_heap = used_at, in_heap
