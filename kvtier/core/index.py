"""Prefix index of one namespace: which blocks are resident, and which follows which.

Residency is *prefix-closed*: a block is in the index only while its parent is. So the presence of
the blocks of a chain is a step function of their position, and the longest match is found by
galloping. A block that must go in spite of its children (corrupt, withdrawn slab) takes its whole
subtree with it: `doom` takes it out of the map at once and `sweep` the rest in slices; meanwhile
`match` scans block by block, which stops at the first gap. A doomed block may be inserted again,
in another row, before its old row is swept.

Blocks live in *rows* of parallel columns: about 100 bytes a block besides the map. Children of a
block are a doubly linked list (first_child, next_sibling, previous_sibling).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvtier.core.columns import grow
from kvtier.core.row_map import RowMap
from kvtier.types import BlockHash

Rows = npt.NDArray[np.int32]

NOBODY = -1
_ROWS_MIN = 1024
# The check holds the event loop; comparing more hashes than these one by one takes too long.
_CHECKED_HASHES_MAX = 10_000


class PrefixIndex:
    """Maps block hashes to rows; keeps the tree of prefixes and each block's place in memory."""

    def __init__(self) -> None:
        self.row_of = RowMap()
        self.hash_of: list[BlockHash | None] = []
        self.parent = np.zeros(0, dtype=np.int32)
        self.place = np.zeros(0, dtype=np.int32)
        self._first_child = np.zeros(0, dtype=np.int32)
        self._next_sibling = np.zeros(0, dtype=np.int32)
        self._previous_sibling = np.zeros(0, dtype=np.int32)
        self._spare_rows: list[int] = []  # Used before, and forgotten.
        self._fresh_row = 0  # Rows from here on were never used.
        self._doomed: list[int] = []  # Roots of subtrees that are still to be swept.

    def __len__(self) -> int:
        return len(self.row_of) + len(self._doomed)

    def has_row(self, row: int) -> bool:
        """Whether the block in this row is resident, and in this row."""
        block = self.hash_of[row]
        return block is not None and self.row_of.get(block) == row

    @property
    def sweep_pending(self) -> bool:
        return bool(self._doomed)

    # ------------------------------------------------------------------------------- questions

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many blocks from the first one on are resident."""
        row_of = self.row_of
        count = len(hashes)
        if self._doomed:
            return next((i for i, block in enumerate(hashes) if block not in row_of), count)
        if not count or hashes[0] not in row_of:
            return 0
        if hashes[count - 1] in row_of:
            return count
        present, step = 0, 1
        while present + step < count and hashes[present + step] in row_of:
            present += step
            step *= 2
        absent = min(present + step, count - 1)
        while absent - present > 1:
            middle = (present + absent) // 2
            if hashes[middle] in row_of:
                present = middle
            else:
                absent = middle
        return absent

    def rows(self, hashes: Sequence[BlockHash]) -> Rows:
        """Rows of the leading blocks that are resident; shorter than `hashes` at a gap."""
        found = self.row_of.get_all(hashes)
        if None in found:
            found = found[: found.index(None)]
        return np.array(found, dtype=np.int32)

    def is_leaf(self, row: int) -> bool:
        return bool(self._first_child[row] == NOBODY)

    def parent_of(self, row: int) -> int | None:
        parent = int(self.parent[row])
        return None if parent == NOBODY else parent

    # --------------------------------------------------------------------------------- changes

    def insert_run(
        self,
        hashes: Sequence[BlockHash],
        *,
        parent: int | None,
        places: npt.NDArray[np.int32],
    ) -> Rows:
        """Insert new blocks that follow one another; the first one follows row `parent`."""
        rows = self._take_rows(len(hashes))
        taken = rows.tolist()
        hash_of = self.hash_of
        for row, block in zip(taken, hashes, strict=True):
            hash_of[row] = block
        self.row_of.add(hashes, taken)
        self.place[rows] = places
        self.parent[rows[1:]] = rows[:-1]
        self._first_child[rows[:-1]] = rows[1:]
        self._first_child[rows[-1]] = NOBODY
        self._next_sibling[rows] = NOBODY
        self._previous_sibling[rows] = NOBODY
        self._link(taken[0], parent)
        return rows

    def remove(self, row: int) -> int | None:
        """Remove a leaf; returns its parent's row if that is a leaf now."""
        assert self._first_child[row] == NOBODY, "a block with children was removed"
        parent = self._unlink(row)
        self._forget(row)
        if parent is not None and self._first_child[parent] == NOBODY:
            return parent
        return None

    def doom(self, row: int) -> int | None:
        """Make a resident block and its subtree unreachable at once; `sweep` then removes them.

        Returns the parent's row if that became a leaf. The row itself is swept as well.
        """
        assert self.has_row(row), "a block was doomed twice"
        block = self.hash_of[row]
        assert block is not None
        self.row_of.remove(block)
        parent = self._unlink(row)
        self._doomed.append(row)
        if parent is not None and self._first_child[parent] == NOBODY:
            return parent
        return None

    def sweep(self, count: int) -> tuple[Rows, list[BlockHash]]:
        """Remove up to `count` doomed blocks, parents before children.

        Returns their rows, which stay unused until `forget_rows`, so that the caller can still read
        the columns; and the hashes that were resident until now.
        """
        swept: list[int] = []
        hashes: list[BlockHash] = []
        while self._doomed and len(swept) < count:
            row = self._doomed.pop()
            child = int(self._first_child[row])
            while child != NOBODY:
                block = self.hash_of[child]
                assert block is not None, "a resident block has a child that is not"
                # Out of the map now, so that nobody dooms or extends it a second time.
                self.row_of.remove(block)
                hashes.append(block)
                self._doomed.append(child)
                child = int(self._next_sibling[child])
            swept.append(row)
        return np.array(swept, dtype=np.int32), hashes

    def forget_rows(self, rows: Rows) -> None:
        """Let swept rows be used again."""
        for row in rows.tolist():
            self.hash_of[row] = None
            self._spare_rows.append(row)
        self.place[rows] = NOBODY

    def dismantle(self, count: int) -> bool:
        """Free up to `count` blocks of an index that nobody uses; True when it is empty.

        Freeing a million hashes in one go would hold the event loop for a tenth of a second.
        """
        for row in self.row_of.pop_some(count):
            self.hash_of[row] = None
        return not len(self.row_of)

    def check_invariants(self) -> list[str]:
        if self._doomed:
            return []  # In between, a doomed subtree breaks the rules on purpose.
        found = []
        rows = np.fromiter(self.row_of.rows(), dtype=np.int32, count=len(self.row_of))
        resident = np.zeros(len(self.hash_of) + 1, dtype=np.bool_)
        resident[rows] = True
        resident[NOBODY] = True  # The root's parent: the last, spare position.
        if not resident[self.parent[rows]].all():
            found.append("a block is resident without its parent: not prefix-closed")
        for block, row in islice(self.row_of.entries(), _CHECKED_HASHES_MAX):
            if self.hash_of[row] != block:
                found.append(f"row {row} does not hold the hash that maps to it")
        if len(rows) + len(self._spare_rows) != self._fresh_row:
            found.append("rows are lost")
        return found

    # --------------------------------------------------------------------------------- helpers

    def _take_rows(self, count: int) -> Rows:
        spare = min(count, len(self._spare_rows))
        taken = self._spare_rows[len(self._spare_rows) - spare :]
        del self._spare_rows[len(self._spare_rows) - spare :]
        taken.reverse()
        end = self._fresh_row + count - spare
        self._make_room(end)
        taken.extend(range(self._fresh_row, end))
        self._fresh_row = end
        return np.array(taken, dtype=np.int32)

    def _make_room(self, count: int) -> None:
        old = len(self.hash_of)
        if count <= old:
            return
        # By an eighth: doubling would leave half the columns unused at a million blocks.
        new = max(count, old + old // 8, _ROWS_MIN)
        self.hash_of.extend([None] * (new - old))
        grow(self.parent, new, NOBODY)
        grow(self.place, new, NOBODY)
        grow(self._first_child, new, NOBODY)
        grow(self._next_sibling, new, NOBODY)
        grow(self._previous_sibling, new, NOBODY)

    def _link(self, row: int, parent: int | None) -> None:
        if parent is None:
            self.parent[row] = NOBODY
            return
        self.parent[row] = parent
        sibling = int(self._first_child[parent])
        self._next_sibling[row] = sibling
        if sibling != NOBODY:
            self._previous_sibling[sibling] = row
        self._first_child[parent] = row

    def _unlink(self, row: int) -> int | None:
        parent = int(self.parent[row])
        following = int(self._next_sibling[row])
        preceding = int(self._previous_sibling[row])
        if preceding != NOBODY:
            self._next_sibling[preceding] = following
        elif parent != NOBODY:
            self._first_child[parent] = following
        if following != NOBODY:
            self._previous_sibling[following] = preceding
        return None if parent == NOBODY else parent

    def _forget(self, row: int) -> None:
        block = self.hash_of[row]
        assert block is not None, "a row was removed twice"
        self.row_of.remove(block)
        self.hash_of[row] = None
        self.place[row] = NOBODY
        self._spare_rows.append(row)
