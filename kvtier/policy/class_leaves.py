"""The leaves of all classes, and in which order they are evicted.

Candidates are two leaves of each class, the one used longest ago and the one used last. Each class
has two heaps of its leaves that forget lazily: an entry counts while the block still is a leaf of
that time and class. So moving a whole chain from class to class costs a few operations on columns,
and heaps know of leaves only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.policy.eviction import ChainOf, Evictable, MayEvict, Rows, Victims

Entry = tuple[float, int]  # Time of use, row; both negative in the heap of the youngest.
Offer = tuple[float, float, int, int]  # What it is worth, time of use, row, class.
Times = npt.NDArray[np.float64]
AnyRows = Rows | npt.NDArray[np.intp]

OLDEST, YOUNGEST = 0, 1
NOBODY, NOBODY_AT = -1, np.inf  # Where there is no candidate.
_ENTRIES_MIN = 64
_FEW = 16  # Blocks of a chain are looked at one by one.


class Worth(Protocol):
    """What keeping a block is worth now; of equal ones the one used longest ago goes first."""

    def of(self, kind: int, used_at: float) -> float: ...

    def of_all(self, used_at: Times) -> Times:
        """Of the candidates of all classes, two of each, one class after the other."""
        ...


class Leaves:
    """Invariant: every leaf has an entry in both heaps of its class, with its time, but for those
    that a nomination holds."""

    def __init__(self, *, youngest: bool = True) -> None:
        """Without `youngest` only the oldest leaf of each class is a candidate."""
        self._youngest = youngest
        self.used_at = np.zeros(0)
        self.kind = np.zeros(0, np.int16)
        self._is_leaf = np.zeros(0, np.bool_)
        self._heaps: list[tuple[list[Entry], list[Entry]]] = []  # By class.
        self._entries_max: list[int] = []  # Beyond it most of them may count no more.
        # The candidates, two of each class, one class after the other.
        self._at: list[float] = []
        self._rows: list[int] = []
        self._changed: set[int] = set()  # Classes whose candidates may be others now.
        self._fresh: list[int] | None = None  # While nominating: new leaves without an entry.
        self._passed: set[int] = set()  # While nominating: those that are not offered again.
        self._put_off: set[int] = set()  # Of these, those without entries.

    # ------------------------------------------------------------------------------- what comes

    def make_room(self, row_count: int) -> None:
        old = len(self.kind)
        if row_count > old:
            new = max(row_count, old + old // 8, 1024)
            for column in (self.used_at, self.kind, self._is_leaf):
                column.resize(new, refcheck=False)

    def insert(self, rows: AnyRows, used_at: Times | float, kinds: npt.NDArray[np.int16]) -> None:
        """New blocks, none of them a leaf before it is said."""
        self._is_leaf[rows] = False
        self.used_at[rows], self.kind[rows] = used_at, kinds

    def move(
        self,
        rows: AnyRows,
        used_at: float | Times,
        kinds: npt.NDArray[np.int16] | int,
    ) -> None:
        """These blocks have this time and class from now on; each its own, or all the same."""
        leaves = rows[self._is_leaf[rows]]
        if len(leaves):
            self._changed.update(self.kind[leaves].tolist())
        self.used_at[rows], self.kind[rows] = used_at, kinds
        for row in leaves.tolist():
            self._push(row)

    def add(self, row: int) -> None:
        if not self._is_leaf.item(row):
            self._is_leaf[row] = True
            if self._fresh is None:
                self._push(row)
            else:
                self._fresh.append(row)

    def remove(self, rows: Sequence[int]) -> None:
        for row in rows:
            if self._is_leaf.item(row):
                self._is_leaf[row] = False
                self._changed.add(self.kind.item(row))

    def entry_count(self) -> int:
        return sum(len(old) + len(young) for old, young in self._heaps)

    # ------------------------------------------------------------------------------- nominating

    def nominate(self, count: int, may_evict: MayEvict, chain_of: ChainOf, worth: Worth) -> Victims:
        """As `EvictionPolicy.nominate`; the least by (worth, time of use, row) goes first."""
        self._fresh = []
        try:
            self._look_again()
            heap = self._offers(worth)
            while heap and count > 0:
                offer = heapq.heappop(heap)
                _, used_at, row, kind = offer
                place = 2 * kind
                if (
                    used_at not in self._at[place : place + 2]
                    or row not in self._rows[place : place + 2]
                ):
                    continue  # Another block of its class has taken its place since.
                while heap and heap[0] == offer:
                    heapq.heappop(heap)  # The oldest leaf may be the youngest too.
                verdict = may_evict(row)
                if verdict is Evictable.INNER:
                    self._is_leaf[row] = False
                else:
                    self._passed.add(row)
                if verdict is Evictable.YES:
                    rival = self._rival(offer, heap, may_evict)
                    chain = self._alike(chain_of(row, count), rival)
                    count -= len(chain)
                    yield chain
                self._push_fresh()
                self._changed.add(kind)
                self._offer_changed(heap, worth)
        finally:
            self._push_fresh()
            self._fresh = None
            for row in self._put_off:
                if self._is_leaf[row]:
                    self._push(row)
            self._put_off.clear()
            self._passed.clear()

    def _alike(self, chain: Sequence[int], rival: int | None) -> Sequence[int]:
        """How much of the chain goes before every other candidate: what has the time and the class
        of its last block. It is worth as little, and the oldest or youngest of its class as that
        one was. After `rival` nothing else goes."""
        used_at, kind = self.used_at.item(chain[0]), self.kind.item(chain[0])
        if len(chain) < _FEW or rival is not None:
            for place, row in enumerate(chain):
                is_alike = self.used_at.item(row) == used_at and self.kind.item(row) == kind
                if place and (not is_alike or (rival is not None and row > rival)):
                    return chain[:place]
            return chain
        rows = np.array(chain)
        unlike = self.used_at[rows] != used_at
        unlike |= self.kind[rows] != kind
        first = int(unlike.argmax())
        return chain[:first] if unlike[first] else chain

    def _rival(self, offer: Offer, heap: list[Offer], may_evict: MayEvict) -> int | None:
        """Of the other leaves of this time that are worth as little the first one; of equal ones
        the lowest row goes first. -1 where that is not so simple."""
        _, used_at, row, kind = offer
        is_oldest = self._rows[2 * kind + OLDEST] == row
        rows = self._same_time(kind, OLDEST if is_oldest else YOUNGEST, used_at, may_evict)
        if rows and not is_oldest:
            return -1  # The youngest of a class is the highest row.
        if heap and heap[0][:2] == offer[:2]:
            rows.append(heap[0][2])
        return min(rows, default=None)

    def _same_time(self, kind: int, which: int, used_at: float, may_evict: MayEvict) -> list[int]:
        """Other leaves of the candidate's time that may go; of many some, with the one that goes
        first."""
        entries, sign = self._heaps[kind][which], -1 if which == YOUNGEST else 1
        mine, found, places = sign * entries[0][1], [], [1, 2]  # Behind the candidate's own.
        for place in places:
            if place < len(entries) and entries[place][0] == sign * used_at:
                row = sign * entries[place][1]
                is_other = row != mine and self._counts(used_at, row, kind)
                # As a rule the block that this chain grew from, which was a leaf before.
                if is_other and may_evict(row) is Evictable.YES:
                    found.append(row)
                else:
                    places += [2 * place + 1, 2 * place + 2]
        return found

    def _offers(self, worth: Worth) -> list[Offer]:
        """Of all candidates, as a heap: in order."""
        at, rows = np.array(self._at), np.array(self._rows)
        values = worth.of_all(at)
        order = np.lexsort((rows, at, values))
        order = order[rows[order] != NOBODY]
        found = (values[order], at[order], rows[order], order >> 1)
        return list(zip(*(column.tolist() for column in found), strict=True))

    def _offer_changed(self, heap: list[Offer], worth: Worth) -> None:
        for kind in self._look_again():
            for place in (2 * kind, 2 * kind + 1):
                used_at, row = self._at[place], self._rows[place]
                if row != NOBODY:
                    heapq.heappush(heap, (worth.of(kind, used_at), used_at, row, kind))

    def _look_again(self) -> list[int]:
        """For the candidates of the classes that changed: which."""
        changed = list(self._changed)
        self._changed.clear()
        for kind in changed:
            self._make_class(kind)
            for which in (OLDEST, YOUNGEST) if self._youngest else (OLDEST,):
                place = 2 * kind + which
                self._at[place], self._rows[place] = self._candidate(kind, which)
        return changed

    def _candidate(self, kind: int, which: int) -> Entry:
        """Forgets entries that count no more."""
        heap, sign = self._heaps[kind][which], -1 if which == YOUNGEST else 1
        while heap:
            used_at, row = sign * heap[0][0], sign * heap[0][1]
            if row in self._passed:
                self._put_off.add(row)
            elif self._counts(used_at, row, kind):
                return used_at, row
            heapq.heappop(heap)
        return NOBODY_AT, NOBODY

    def _counts(self, used_at: float, row: int, kind: int) -> bool:
        is_leaf: bool = self._is_leaf.item(row)
        return is_leaf and self.used_at.item(row) == used_at and self.kind.item(row) == kind

    # ---------------------------------------------------------------------------------- helpers

    def _push_fresh(self) -> None:
        if self._fresh:
            for row in self._fresh:
                self._push(row)
            self._fresh.clear()

    def _push(self, row: int) -> None:
        kind, used_at = self.kind.item(row), self.used_at.item(row)
        self._make_class(kind)
        old, young = self._heaps[kind]
        heapq.heappush(old, (used_at, row))
        heapq.heappush(young, (-used_at, -row))
        if max(len(old), len(young)) > self._entries_max[kind]:
            self._tidy(kind)
        self._changed.add(kind)

    def _tidy(self, kind: int) -> None:
        """Forget the entries that count no more, and those that say the same twice."""
        old, young = self._heaps[kind]
        entries: Iterable[Entry] = [*old, *((-at, -row) for at, row in young)]
        found = sorted({entry for entry in entries if self._counts(*entry, kind)})
        # Sorted lists are heaps.
        self._heaps[kind] = found, [(-at, -row) for at, row in reversed(found)]
        self._entries_max[kind] = 2 * len(found) + _ENTRIES_MIN

    def _make_class(self, kind: int) -> None:
        while len(self._heaps) <= kind:
            self._heaps.append(([], []))
            self._entries_max.append(_ENTRIES_MIN)
            self._rows += [NOBODY, NOBODY]
            self._at += [NOBODY_AT, NOBODY_AT]
