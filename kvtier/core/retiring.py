"""Emptying the segment that is reused next: oldest first, whoever filled it.

What of it was used since it was written goes again, once, to a segment that is being filled; blocks
that are not in memory are promoted for that. The rest is forgotten in slices. One segment of a tier
retires at a time, and only when somebody needs one; a segment with pinned or reserved slots is
passed over.

At most half of a segment goes again: otherwise a set of blocks as large as the pool, all in use,
would be written round and round and nothing new let in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from kvtier.core import instructions as ins
from kvtier.core.index import NOBODY, RowFlag, Rows
from kvtier.core.lower_tier import LowerTier
from kvtier.core.residency import Residency
from kvtier.layout import SegmentHeader
from kvtier.types import RemovedFor

_EMPTIED_SLICE_BLOCKS = 256


class Retiring:
    """Part of the block manager."""

    def __init__(self, lower: LowerTier, *, wait_seconds: float) -> None:
        self._lower = lower
        self._wait_seconds = wait_seconds
        self._life: SegmentHeader | None = None
        self._began_at = 0.0
        self._is_blocked = False  # What is left of the segment is being read or written.
        self._waiting: set[int] = set()  # Slots whose blocks are to go again.
        self._again: deque[int] = deque()  # Of these, rows in memory, not yet under way …
        self._absent: list[int] = []  # … and rows that must be promoted first.
        self.reused_count = 0
        self.again_count = 0
        self.dropped_count = 0

    @property
    def may_begin(self) -> bool:
        """Not while another segment retires."""
        return self._life is None and self._lower.is_writable

    def begin(self, now: float, may_retire: Callable[[SegmentHeader], bool]) -> bool:
        """Somebody needs a segment: one of those that `may_retire`; whether there is any."""
        assert self.may_begin, "two segments retire"
        book = self._lower.book
        life = book.oldest_of_all(may_retire)
        if life is None:
            return False
        self._life, self._began_at, self._is_blocked = life, now, False
        residency = self._lower.residency_of(life.fingerprint)
        slots = book.ready_slots(life.segment)
        if residency is not None and len(slots):
            self._sort_out(residency, slots, life)
        book.stop_filling(life.segment)
        return True

    def _sort_out(self, residency: Residency, slots: np.ndarray, life: SegmentHeader) -> None:
        index, columns = residency.index, self._lower.columns(residency.index)
        rows = self._lower.rows_at(slots)
        rows = rows[rows != NOBODY]
        hot = rows[(columns.flags[rows] & RowFlag.HOT) != 0][: life.slot_count // 2]
        self._waiting = set(columns.slot[hot].tolist())
        ready = residency.tier.is_ready(index.place[hot])
        ready[ready] = residency.tier.summed[index.place[hot][ready]]
        self._again = deque(hot[ready].tolist())
        self._absent = hot[~ready & (index.place[hot] == NOBODY)].tolist()

    def take_batch(self, count: int) -> tuple[Residency, Rows] | None:
        """Blocks to be demoted again, flagged DEMOTING; `note_begun` is told how many were."""
        residency = self._residency()
        if residency is None or not self._again:
            return None
        flags = self._lower.columns(residency.index).flags
        rows: list[int] = []
        while self._again and len(rows) < count:
            row = self._again.popleft()
            slot = self._slot_of(residency, row)
            if slot not in self._waiting or flags[row] & RowFlag.DEMOTING:
                continue  # Also one that came twice: it left memory and is back.
            if residency.is_in_memory(row):
                flags[row] |= RowFlag.DEMOTING
                rows.append(row)
            else:
                self._waiting.discard(slot)
        return (residency, np.array(rows, dtype=np.int32)) if rows else None

    def note_begun(self, residency: Residency, rows: Rows, count: int) -> None:
        """The first of a batch go again; for the others there is no slot."""
        self.again_count += count
        columns = self._lower.columns(residency.index)
        columns.flags[rows[count:]] &= ~RowFlag.DEMOTING
        self.note_ended(columns.slot[rows[count:]].tolist())

    def take_absent(self) -> tuple[Residency, Rows] | None:
        """Blocks that must be promoted in order to go again."""
        residency = self._residency()
        if residency is None or not self._absent:
            return None
        # Not those that somebody else is having promoted by now: they come without us.
        rows = [
            row
            for row in self._absent
            if self._slot_of(residency, row) in self._waiting
            and residency.index.place[row] == NOBODY
        ]
        self._absent = []
        return residency, np.array(rows, dtype=np.int32)

    def put_back_absent(self, rows: Rows) -> None:
        """So many cannot be promoted at once."""
        self._absent = rows.tolist()

    def note_promoted(self, residency: Residency, rows: Rows) -> None:
        """These blocks are in memory now."""
        if self._waiting and residency is self._residency():
            self._again.extend(
                row for row in rows.tolist() if self._slot_of(residency, row) in self._waiting
            )

    def note_ended(self, slots: list[int]) -> None:
        """Blocks in these slots have gone again, or will not."""
        self._waiting.difference_update(slots)
        self.note_unblocked()

    def note_unblocked(self) -> None:
        """Slots are read or written no more."""
        self._is_blocked = False

    def is_due(self, now: float) -> bool:
        """Whether `step` has something to do, as far as is known."""
        if self._life is None or not self._lower.is_writable:
            return False  # When nothing is written nobody needs a segment.
        if self._is_late(now):
            return True
        # Those that wait may be gone: evicted or cleared.
        return not self._is_blocked and not any(map(self._lower.book.is_ready, self._waiting))

    def step(self, now: float) -> list[ins.Instruction] | None:
        """Forget a slice; None when there is nothing to do now."""
        life = self._life
        if life is None or not self._lower.is_writable:
            return None
        book = self._lower.book
        if book.life_of(life.segment) != life:
            self._end()
            self.reused_count += 1
            return None
        if self._is_late(now):
            self._waiting.clear()  # A disk that stalls must not keep the others waiting for ever.
        self._waiting = {slot for slot in self._waiting if book.is_ready(slot)}
        if self._waiting:
            return None
        slots = [
            slot for slot in book.ready_slots(life.segment).tolist() if not book.is_pinned(slot)
        ]
        if not slots:
            self._is_blocked = True  # The end of the reads tells.
            if self._is_late(now):
                self._end()  # Somebody else's turn; this one is the oldest again afterwards.
            return None
        return self.forget(life, slots[:_EMPTIED_SLICE_BLOCKS])

    def forget(self, life: SegmentHeader, slots: list[int]) -> list[ins.Instruction]:
        """Blocks of one segment lose their copies."""
        self.dropped_count += len(slots)
        residency = self._lower.residency_of(life.fingerprint)
        if residency is None:
            return self._lower.forget_slots(slots)
        rows = self._lower.rows_at(np.array(slots, dtype=np.uint32))
        flags = self._lower.columns(residency.index).flags
        flags[rows[rows != NOBODY]] |= RowFlag.GIVEN_UP
        return self._lower.lose(residency, slots, RemovedFor.SEGMENT)

    def _end(self) -> None:
        self._life = None
        self._waiting.clear()
        self._again.clear()
        self._absent = []

    def _is_late(self, now: float) -> bool:
        return now - self._began_at > self._wait_seconds

    def _residency(self) -> Residency | None:
        return None if self._life is None else self._lower.residency_of(self._life.fingerprint)

    def _slot_of(self, residency: Residency, row: int) -> int:
        slot = self._lower.columns(residency.index).slot
        return int(slot[row]) if row < len(slot) else NOBODY
