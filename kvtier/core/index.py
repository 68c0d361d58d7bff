"""Prefix index of one namespace: which blocks are resident, and which follows which.

Residency is *prefix-closed*: a block is in the index only while its parent is. So the presence of
the blocks of a chain is a step function of their position, and the longest match is found by
galloping. A block that must go in spite of its children (corrupt, withdrawn slab) takes its whole
subtree with it: `doom` takes it out of the map at once and `sweep` the rest in slices; meanwhile
`match` scans block by block, which stops at the first gap. A doomed block may be inserted again,
in another row, before its old row is swept.

Blocks live in *rows* of parallel columns: about 100 bytes a block besides the map. Children of a
block are a doubly linked list (first_child, next_sibling, previous_sibling). Where a block's
replicas are is told by `place` (memory) and, for each tier below, its `slot`; NOBODY where there is
none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvtier.core.columns import grow
from kvtier.core.row_map import RowMap
from kvtier.types import BlockHash, TierName

Rows = npt.NDArray[np.int32]

NOBODY = -1
# A parent that comes in the same call, at position k: IN_CALL - k.
IN_CALL = -2
USES_MAX = 255
_ROWS_MIN = 1024
# The check holds the event loop; comparing more hashes than these one by one takes too long.
_CHECKED_HASHES_MAX = 10_000
# Less is sooner asked for one by one.
_RUN_MIN = 32


class RowFlag:
    """Marks of a block that has to do with a tier below memory; each tier has its own."""

    SPARE = np.uint8(1)  # It waits to be demoted if the write budget has room to spare.
    ADMITTED = np.uint8(2)  # It waits to be demoted.
    DEMOTING = np.uint8(4)
    HOT = np.uint8(8)  # Used since it was written there.
    DIRECT = np.uint8(16)  # Leased as it lies there, and not promoted since.
    GIVEN_UP = np.uint8(32)  # It lost its segment, or got none, and nobody has asked since.


class LowerColumns:
    """What a tier below memory knows of each row."""

    __slots__ = ("flags", "slot")

    def __init__(self) -> None:
        self.slot = np.zeros(0, dtype=np.int64)  # NOBODY where it has no copy.
        self.flags = np.zeros(0, dtype=np.uint8)  # RowFlag.


class PrefixIndex:
    """Maps block hashes to rows; keeps the tree of prefixes and each block's place in memory."""

    def __init__(
        self, tiers: Sequence[TierName] = (TierName.NVME,), *, chained: bool = True
    ) -> None:
        """`tiers`: those below memory, the fastest first. Without `chained` no block has a parent,
        and of a list of hashes any may be resident."""
        self._chained = chained
        self.row_of = RowMap()
        self.hash_of: list[BlockHash | None] = []
        self.parent = np.zeros(0, dtype=np.int32)
        self.place = np.zeros(0, dtype=np.int32)
        self.lower = {tier: LowerColumns() for tier in tiers}
        self.memory_children = np.zeros(0, dtype=np.int32)  # Children with a replica in memory.
        self.uses = np.zeros(0, dtype=np.uint8)  # Since the block came; stays at USES_MAX.
        self.used_at = np.zeros(0, dtype=np.float64)  # Last use, for the order in which to forget.
        self._first_child = np.zeros(0, dtype=np.int32)
        self._next_sibling = np.zeros(0, dtype=np.int32)
        self._previous_sibling = np.zeros(0, dtype=np.int32)
        # (column, what rows without a block have in it). Only ever lengthened where they lie.
        self._columns: list[tuple[npt.NDArray[np.generic], float]] = [
            (self.parent, NOBODY),
            (self.place, NOBODY),
            (self.memory_children, 0),
            (self.uses, 0),
            (self.used_at, 0.0),
            (self._first_child, NOBODY),
            (self._next_sibling, NOBODY),
            (self._previous_sibling, NOBODY),
        ]
        for columns in self.lower.values():
            self._columns += [(columns.slot, NOBODY), (columns.flags, 0)]
        self._room = 0  # Rows that every column has.
        self._spare_rows: list[int] = []  # Used before, and forgotten.
        self._fresh_row = 0  # Rows from here on were never used.
        self._doomed: list[int] = []  # Roots of subtrees that are still to be swept.

    def __len__(self) -> int:
        return len(self.row_of) + len(self._doomed)

    def has_row(self, row: int) -> bool:
        """Whether the block in this row is resident, and in this row."""
        block = self.hash_of[row]
        # A row with a hash that is not resident is doomed, or lies below one that is.
        return block is not None and (not self._doomed or self.row_of.get(block) == row)

    def is_whole(self, row: int) -> bool:
        """Whether the block in this row is resident and its parent too. What lies below a doomed
        block is not, sooner or later; whoever would give it another replica need not."""
        parent = int(self.parent[row])
        return self.has_row(row) and (parent == NOBODY or self.has_row(parent))

    @property
    def sweep_pending(self) -> bool:
        return bool(self._doomed)

    # ------------------------------------------------------------------------------- questions

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many blocks from the first one on are resident."""
        row_of = self.row_of
        count = len(hashes)
        if self._doomed or not self._chained:
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
        """Rows of the leading blocks that are resident; shorter than `hashes` at a gap.

        Blocks that came together as a rule have rows that follow one another: such a run is
        compared with the hashes that lie there, as a question for each takes several times as long.
        """
        parts: list[npt.NDArray[np.int32]] = []
        at, size = 0, _RUN_MIN
        while at < len(hashes):
            part = hashes[at : at + size]
            first = self.row_of.get(part[0])
            if first is None:
                break
            # A doomed block keeps its hash until it is swept, and is not resident.
            if not self._doomed and self.hash_of[first : first + len(part)] == part:
                parts.append(np.arange(first, first + len(part), dtype=np.int32))
                at, size = at + len(part), 2 * size
            elif size > _RUN_MIN:
                size = _RUN_MIN  # The run ends somewhere in this part.
            else:
                found = self.row_of.get_all(part)
                if None in found:
                    parts.append(np.array(found[: found.index(None)], dtype=np.int32))
                    break
                parts.append(np.array(found, dtype=np.int32))
                at += len(part)
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    def are_lower(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of these have a copy in a tier below memory."""
        found = np.zeros(len(rows), dtype=np.bool_)
        for columns in self.lower.values():
            found |= columns.slot[rows] != NOBODY
        return found

    def is_lower(self, row: int) -> bool:
        return any(columns.slot.item(row) != NOBODY for columns in self.lower.values())

    def has_lower(self, rows: Sequence[int]) -> bool:
        """Whether any of these has a copy in a tier below memory."""
        return any(
            columns.slot.item(row) != NOBODY for columns in self.lower.values() for row in rows
        )

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
        """Insert new blocks that follow one another, each with a replica in memory.

        The first one follows row `parent`.
        """
        rows = self._take_rows(len(hashes))
        taken = rows.tolist()
        hash_of = self.hash_of
        for row, block in zip(taken, hashes, strict=True):
            hash_of[row] = block
        self.row_of.add(hashes, taken)
        self.place[rows] = places
        self.memory_children[rows[:-1]] = 1
        self.memory_children[rows[-1]] = 0
        if parent is not None:
            self.memory_children[parent] += 1
        self._begin(rows)
        self.parent[rows[1:]] = rows[:-1]
        self._first_child[rows[:-1]] = rows[1:]
        self._first_child[rows[-1]] = NOBODY
        self._next_sibling[rows] = NOBODY
        self._previous_sibling[rows] = NOBODY
        self._link(taken[0], parent)
        return rows

    def adopt(
        self,
        hashes: Sequence[BlockHash],
        *,
        parents: npt.NDArray[np.int32],
        lower_slots: npt.NDArray[np.int64],
        tier: TierName = TierName.NVME,
    ) -> Rows:
        """Insert new blocks of any number of chains, each with a replica in this tier only.

        `parents[i]` is a resident row, NOBODY for the first block of a chain, or IN_CALL - k for
        the block at position k < i.
        """
        assert len(hashes) == len(parents) == len(lower_slots), "a parent and a slot a block"
        rows = self.adopt_bare(hashes, parents)
        self.lower[tier].slot[rows] = lower_slots
        return rows

    def adopt_bare(self, hashes: Sequence[BlockHash], parents: npt.NDArray[np.int32]) -> Rows:
        """As `adopt`, but of blocks whose replicas the caller enters, in the same event."""
        if not len(hashes):
            return np.zeros(0, dtype=np.int32)
        rows = self._take_rows(len(hashes))
        self._put_hashes(rows, hashes)
        self.row_of.add_many(hashes, rows.tolist())
        in_call = parents <= IN_CALL
        parents = parents.copy()
        parents[in_call] = rows[IN_CALL - parents[in_call]]
        self.place[rows] = NOBODY
        self.memory_children[rows] = 0
        self._begin(rows)
        self.parent[rows] = parents
        self._first_child[rows] = NOBODY
        self._next_sibling[rows] = NOBODY
        self._previous_sibling[rows] = NOBODY
        self._link_all(rows[parents != NOBODY], parents[parents != NOBODY])
        return rows

    def leave_memory(self, rows: list[int]) -> int | None:
        """The replicas in memory of a chain, its last block first, are gone; but for the first of
        `rows`, none has a child in memory that is not among them. Returns the row before the chain
        if that has no children in memory any more. A list: NumPy takes a tuple for axes, and an
        empty one for the whole column."""
        self.place[rows] = NOBODY
        self.memory_children[rows[1:]] = 0
        parent = self.parent.item(rows[-1])
        if parent == NOBODY:
            return None
        left = self.memory_children.item(parent) - 1
        self.memory_children[parent] = left
        return parent if left == 0 else None

    def enter_memory(self, rows: Rows) -> None:
        """These blocks have a replica in memory now, where `place` says already."""
        parents = self.parent[rows]
        np.add.at(self.memory_children, parents[parents != NOBODY], 1)

    def remove_all(self, rows: Sequence[int]) -> None:
        """Remove a chain without replicas, its last block first, which has no children; nor have
        the others but for it."""
        hash_of, row_of = self.hash_of, self.row_of
        assert self._first_child.item(rows[0]) == NOBODY, "a block with children was removed"
        for row in rows:
            block = hash_of[row]
            assert block is not None, "a row was removed twice"
            row_of.remove(block)
            hash_of[row] = None
        self._unlink(rows[-1])
        self._leave_lower(np.array(rows, dtype=np.int32))
        self._spare_rows.extend(rows)

    def are_only_children(self, rows: Sequence[int]) -> bool:
        """Whether of this chain, its last block first, that one has no children and the others
        none but it."""
        chain = np.array(rows, dtype=np.int32)
        if self._first_child.item(rows[0]) != NOBODY:
            return False
        before = self._first_child.take(chain[1:]) == chain[:-1]
        before &= self._next_sibling.take(chain[:-1]) == NOBODY
        return bool(np.count_nonzero(before) == len(before))

    def remove(self, row: int) -> None:
        """Remove a leaf without replicas."""
        assert self._first_child[row] == NOBODY, "a block with children was removed"
        self._unlink(row)
        self._forget(row)

    def doom(self, row: int) -> None:
        """Make a block without replicas and its subtree unreachable at once; `sweep` then removes
        them, the row itself as well."""
        assert self.has_row(row), "a block was doomed twice"
        block = self.hash_of[row]
        assert block is not None
        self.row_of.remove(block)
        self._unlink(row)
        self._doomed.append(row)

    def sweep(self, count: int) -> tuple[Rows, Rows]:
        """Remove up to `count` doomed blocks, parents before children.

        Returns their rows, which stay unused until `forget_rows`, so that the caller can still read
        the columns; and the rows of blocks that were resident until now: their children.
        """
        swept: list[int] = []
        left: list[int] = []
        while self._doomed and len(swept) < count:
            row = self._doomed.pop()
            child = int(self._first_child[row])
            while child != NOBODY:
                block = self.hash_of[child]
                assert block is not None, "a resident block has a child that is not"
                # Out of the map now, so that nobody dooms or extends it a second time.
                self.row_of.remove(block)
                left.append(child)
                self._doomed.append(child)
                child = int(self._next_sibling[child])
            swept.append(row)
        return np.array(swept, dtype=np.int32), np.array(left, dtype=np.int32)

    def forget_rows(self, rows: Rows) -> None:
        """Let swept rows be used again."""
        for row in rows.tolist():
            self.hash_of[row] = None
            self._spare_rows.append(row)
        self.place[rows] = NOBODY
        self._leave_lower(rows)

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
        if ((self.place[rows] == NOBODY) & ~self.are_lower(rows)).any():
            found.append("a block is resident without a replica")
        for block, row in islice(self.row_of.entries(), _CHECKED_HASHES_MAX):
            if self.hash_of[row] != block:
                found.append(f"row {row} does not hold the hash that maps to it")
        if len(rows) + len(self._spare_rows) != self._fresh_row:
            found.append("rows are lost")
        return found

    # --------------------------------------------------------------------------------- helpers

    def _leave_lower(self, rows: Rows | int) -> None:
        for columns in self.lower.values():
            columns.slot[rows] = NOBODY
            columns.flags[rows] = 0

    def _begin(self, rows: Rows) -> None:
        """What every new block begins with."""
        self._leave_lower(rows)
        self.uses[rows] = 1

    def _take_rows(self, count: int) -> Rows:
        spare = min(count, len(self._spare_rows))
        end = self._fresh_row + count - spare
        self._make_room(end)
        rows = np.empty(count, dtype=np.int32)
        if spare:
            rows[:spare] = self._spare_rows[: -spare - 1 : -1]  # The last ones first.
            del self._spare_rows[-spare:]
        rows[spare:] = np.arange(self._fresh_row, end)
        self._fresh_row = end
        return rows

    def _put_hashes(self, rows: Rows, hashes: Sequence[BlockHash]) -> None:
        first, count = int(rows[0]), len(rows)
        if (rows == np.arange(first, first + count)).all():
            self.hash_of[first : first + count] = hashes
            return
        for row, block in zip(rows.tolist(), hashes, strict=True):
            self.hash_of[row] = block

    def _make_room(self, count: int) -> None:
        """For rows 0 .. count - 1."""
        if count <= self._room:
            return
        if count > len(self.hash_of):
            self.hash_of.extend([None] * (_row_count(count, 0.0) - len(self.hash_of)))
        for number, (column, fill) in enumerate(self._columns, start=1):
            if count > len(column):
                grow(column, _row_count(count, number / (len(self._columns) + 1)), fill)
        self._room = min(len(self.hash_of), *(len(column) for column, _ in self._columns))

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

    def _link_all(self, rows: Rows, parents: Rows) -> None:
        """As `_link` for each, but those of one parent stay in their order."""
        if not len(rows):
            return
        order = np.argsort(parents, kind="stable")
        rows, parents = rows[order], parents[order]
        is_first = np.ones(len(rows), dtype=np.bool_)
        is_first[1:] = parents[1:] != parents[:-1]
        is_last = np.append(is_first[1:], True)
        self._previous_sibling[rows[~is_first]] = rows[:-1][~is_first[1:]]
        self._next_sibling[rows[~is_last]] = rows[1:][~is_last[:-1]]
        siblings = self._first_child[parents[is_last]]
        self._next_sibling[rows[is_last]] = siblings
        with_siblings = siblings != NOBODY
        self._previous_sibling[siblings[with_siblings]] = rows[is_last][with_siblings]
        self._first_child[parents[is_first]] = rows[is_first]

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
        self._leave_lower(row)
        self._spare_rows.append(row)


def _row_count(least: int, phase: float) -> int:
    """How many rows a column has that has at least so many.

    It grows by an eighth: doubling would leave half the columns unused at a million blocks. And
    with another phase it grows at another time: all columns at once hold the event loop for 20 ms.
    """
    steps = math.log(max(least, _ROWS_MIN) / _ROWS_MIN, 1.125)
    return max(least, int(_ROWS_MIN * 1.125 ** (math.ceil(steps - phase) + phase)))
