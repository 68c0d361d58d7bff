"""A tier below memory, of all namespaces: which slot holds which block, and what it loses.

The book of segments says which slots are in use; the index of each namespace says where a block's
copy lies; here is the way back, from a slot to its block. A segment of a namespace that nobody has
opened in this life of the daemon holds blocks without rows; they are taken in by BlocksRecovered,
or go when the segment is reused.

Invariant: a slot that the book says READY is named by exactly one row, or its namespace is not
taken in yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.index import IN_CALL, NOBODY, LowerColumns, PrefixIndex, RowFlag, Rows
from kvtier.core.residency import Residency
from kvtier.core.runs import runs_of
from kvtier.core.segments import Group, Mask, SegmentBook, Slots, by_segment
from kvtier.core.taking_in import after_slice, begin_slice, find_resident, parent_codes
from kvtier.types import BlockHash, NamespaceId, PackedHashes, RemovedFor, TierName

# Blocks taken in between two turns of the event loop: about 2 ms.
RECOVERED_SLICE_BLOCKS = 2048
_LOST_SLICE_BLOCKS = 256


class LowerTier:
    """Closed until LowerOpened comes; part of the block manager."""

    def __init__(self, tier: TierName, namespaces: Mapping[NamespaceId, Residency]) -> None:
        self.tier = tier
        self._namespaces = namespaces
        self._book: SegmentBook | None = None
        self._row_of: dict[int, Rows] = {}  # By segment: the row of each slot's block.
        self._namespace_of: dict[bytes, NamespaceId] = {}  # By fingerprint.
        self._owners: Mapping[bytes, str] = {}  # Of namespaces of former lives.
        self.is_writable = False
        self.is_readable = False
        self.is_direct = False  # Slots may be leased as they are, see direct.py.
        self.leased_count = 0  # Pins of such leases.
        self.dropped_count = 0  # Recovered blocks that could not be taken in.

    def columns(self, index: PrefixIndex) -> LowerColumns:
        return index.lower[self.tier]

    @property
    def is_open(self) -> bool:
        return self._book is not None

    @property
    def book(self) -> SegmentBook:
        assert self._book is not None, f"the {self.tier} tier is not open"
        return self._book

    def residency_of(self, fingerprint: bytes) -> Residency | None:
        found = self._namespace_of.get(fingerprint)
        return None if found is None else self._namespaces[found]

    def tenant_of(self, fingerprint: bytes) -> str | None:
        """Whose the namespace is; None for one that nobody knows any more."""
        residency = self.residency_of(fingerprint)
        return self._owners.get(fingerprint) if residency is None else residency.facts.tenant

    def has_room_for(self, residency: Residency) -> bool:
        """Whether the namespace's blocks can lie here: one larger than a segment cannot."""
        facts = residency.facts
        return bool(facts.fingerprint) and self.book.slot_count(facts.layout) > 0

    def note_namespace(self, residency: Residency) -> None:
        self._namespace_of[residency.facts.fingerprint] = residency.facts.namespace

    # --------------------------------------------------------------------------------- opening

    def on_opened(self, event: ev.LowerOpened, now: float) -> list[ins.Instruction]:
        assert self._book is None, f"the {self.tier} pool was opened twice"
        self._book = SegmentBook(
            segment_bytes=event.segment_bytes,
            segment_count=event.segment_count,
            row_count_max=event.row_count_max,
            lane_count=event.lane_count,
            sequence_first=event.sequence_first,
            key_id=event.key_id,
        )
        self._book.adopt(event.lives)
        self._owners = dict(event.owners)
        self.is_readable = True
        self.is_writable = event.is_writable
        self.is_direct = event.is_direct
        return []

    def on_blocks_recovered(self, event: ev.BlocksRecovered, now: float) -> list[ins.Instruction]:
        residency = self._namespaces[event.namespace]
        if not self.is_readable:
            return []
        start, stop = event.done_count, event.done_count + RECOVERED_SLICE_BLOCKS
        event, rows = begin_slice(event, residency)
        slots = event.lower_slots[start:stop]
        groups = list(by_segment(slots, self.book.row_count_max))
        valid = self.book.are_ready(slots, event.sequences[start:stop], groups)
        if event.epoch == residency.epoch:
            kept = self._take_in(residency, event, rows, start, valid)
            if kept.all():
                self._name(residency, rows[start:stop], slots, groups)
            else:
                self._name(residency, rows[start:stop][kept], slots[kept])
        else:  # Cleared since the pool was read: all of it is void.
            kept = np.zeros_like(valid)
        lost = slots[~kept & valid]
        self.dropped_count += len(lost)
        found = self.forget_slots(lost.tolist())
        if kept.any():
            size = residency.facts.hash_bytes
            mine = PackedHashes(event.packed[start * size : stop * size], size)
            found.append(ins.BlocksTakenIn(event.namespace, self.tier, mine, kept))
        if stop < len(event.lower_slots):
            found.append(ins.Continue(after_slice(event, residency, rows, stop)))
        return found

    def _take_in(
        self, residency: Residency, event: ev.BlocksRecovered, rows: Rows, start: int, valid: Mask
    ) -> Mask:
        """Give rows to the blocks of this part, of which `valid` are still in their slots; which
        of them are to have their copy in this tier there."""
        index = residency.index
        stop = start + len(valid)
        hashes = PackedHashes(event.packed, residency.facts.hash_bytes)[start:stop]
        slots = event.lower_slots[start:stop]
        mine = rows[start:stop]  # A view: what is written to it is remembered.
        find_resident(event, index, hashes, mine)
        # Whoever was committed meanwhile gets the copy; a copy it has already stays.
        kept: Mask = valid & (mine != NOBODY)
        kept[kept] = self.columns(index).slot[mine[kept]] == NOBODY
        fresh = valid & (mine == NOBODY)
        codes, fresh = parent_codes(event, residency, rows, start, fresh)
        chosen = np.flatnonzero(fresh)
        mine[chosen] = index.adopt(
            hashes if fresh.all() else [hashes[one] for one in chosen.tolist()],
            parents=codes[chosen],
            lower_slots=slots[chosen].astype(np.int64),
            tier=self.tier,
        )
        kept = kept | fresh
        if event.used_at is not None:
            index.used_at[mine[chosen]] = event.used_at[start:stop][chosen]
        return kept

    def on_blocks_found(self, event: ev.BlocksFound) -> tuple[list[ins.Instruction], bool]:
        """Take in what others have put here, as far as there are slots; whether there were too few.

        Blocks whose parent is not resident by now are left out, and all of a former epoch.
        """
        assert len(event.hashes) <= ev.FOUND_BLOCKS_MAX, "more blocks than one event takes in"
        residency = self._namespaces[event.namespace]
        index, facts = residency.index, residency.facts
        parent = NOBODY if event.parent is None else index.row_of.get(event.parent)
        is_void = event.epoch != residency.epoch or parent is None or not self.is_writable
        if is_void or not self.has_room_for(residency):
            return [], False
        there = index.row_of.get_all(event.hashes)
        wanted = [
            place
            for place, row in enumerate(there)
            if row is None or self.columns(index).slot[row] == NOBODY
        ]
        reserved = self.book.reserve(facts.fingerprint, facts.layout, len(wanted), reuse=False)
        self.forget_segments([header.segment for header in reserved.bound])
        found: list[ins.Instruction] = []
        if reserved.bound:
            found.append(ins.BindSegments(reserved.bound, self.tier))
        stop = len(event.hashes)
        if len(reserved.slots) < len(wanted):
            stop = wanted[len(reserved.slots)]  # The chain ends before what has no slot.
        if len(reserved.slots):
            self.book.commit(reserved.slots)
            hashes = list(event.hashes[:stop])
            rows = self._rows_found(residency, hashes, there[:stop], parent, reserved.slots)
            found += self._stored(residency, rows, reserved.slots)
        return found, stop < len(event.hashes)

    def _rows_found(
        self,
        residency: Residency,
        hashes: list[BlockHash],
        there: list[int | None],
        parent: int | None,
        slots: Slots,
    ) -> Rows:
        """Rows of the blocks that get these slots; those not resident yet are inserted."""
        index = residency.index
        column = self.columns(index).slot
        assert parent is not None
        fresh: list[BlockHash] = []
        codes: list[int] = []  # Of their parents, as `adopt` wants them.
        places: list[int] = []  # Of each block that gets a slot, its row or its place in `fresh`.
        before = parent
        for block, row in zip(hashes, there, strict=True):
            if row is None:
                codes.append(before)
                before = IN_CALL - len(fresh)
                places.append(before)
                fresh.append(block)
            else:
                before = row
                if column[row] == NOBODY:
                    places.append(row)
        mine = np.array(places, dtype=np.int32)
        is_fresh = mine <= IN_CALL
        rows = index.adopt(
            fresh,
            parents=np.array(codes, dtype=np.int32),
            lower_slots=slots[is_fresh].astype(np.int64),
            tier=self.tier,
        )
        mine[is_fresh] = rows
        self._name(residency, mine, slots)
        return mine

    def _stored(self, residency: Residency, rows: Rows, slots: Slots) -> list[ins.Instruction]:
        hashes, parents = residency.named(rows)
        namespace = residency.facts.namespace
        return [
            ins.WriteLowerReady(
                namespace=namespace,
                lower_slots=slots,
                hashes=hashes,
                parents=parents,
                checksums=np.zeros(len(slots), dtype=np.uint64),
                epoch=residency.epoch,
                sequence=self.book.take_sequences(len(slots)),
                tier=self.tier,
            ),
            *(
                ins.BlocksStored(namespace, self.tier, run, before)
                for run, before in runs_of(hashes, parents)
            ),
        ]

    def on_changed(self, event: ev.LowerChanged, now: float) -> list[ins.Instruction]:
        self.is_writable = False
        if not event.readable:
            self.is_readable = False
            return [ins.Continue(ev.SweepVoid())]
        return []

    # ---------------------------------------------------------------------------------- blocks

    def commit(self, residency: Residency, rows: Rows, slots: Slots) -> list[ins.Instruction]:
        """Reserved slots hold the blocks of these rows now; what of the slots that they leave."""
        before = self.columns(residency.index).slot[rows]
        left: list[int] = before[before != NOBODY].tolist()
        self.book.commit(slots)
        self._name(residency, rows, slots)
        return self.forget_slots(left)

    def lose(
        self, residency: Residency, slots: Sequence[int], reason: RemovedFor
    ) -> list[ins.Instruction]:
        """The blocks in these READY slots lose their copies."""
        hashes: list[BlockHash] = []
        for slot in slots:
            row = self.row_at(slot)
            if row != NOBODY and residency.index.has_row(row):
                block = residency.index.hash_of[row]
                assert block is not None, "a resident row without its hash"
                hashes.append(block)
                residency.leave_lower(self.tier, row)
            elif row != NOBODY:
                # Doomed; it has not been swept yet.
                self.columns(residency.index).slot[row] = NOBODY
        found = self.forget_slots(slots)
        if hashes:
            found.append(ins.BlocksRemoved(residency.facts.namespace, self.tier, hashes, reason))
        return found

    def lose_some(self) -> list[ins.Instruction] | None:
        """A slice of everything, once the pool cannot be read any more; None when all is gone."""
        if self._book is None or self.is_readable:
            return None
        for life in self._book.lives():
            slots = self._book.ready_slots(life.segment).tolist()[:_LOST_SLICE_BLOCKS]
            if slots:
                residency = self.residency_of(life.fingerprint)
                if residency is None:
                    return self.forget_slots(slots)
                return self.lose(residency, slots, RemovedFor.TIER_OFF)
        return None

    def forget_slots(self, slots: Sequence[int]) -> list[ins.Instruction]:
        """These READY slots hold nothing any more; no row names them."""
        if not slots:
            return []
        count_max = self.book.row_count_max
        for slot in slots:
            rows = self._row_of.get(slot // count_max)
            if rows is not None:
                rows[slot % count_max] = NOBODY
        gone = np.array(slots, dtype=np.uint32)
        self.book.void(gone)
        return [ins.WriteLowerGone(gone, self.tier)]

    def clear(self, fingerprint: bytes) -> None:
        """Every block of the namespace is void."""
        if self._book is None:
            return
        for life in self._book.lives():
            if life.fingerprint == fingerprint:
                self._row_of.pop(life.segment, None)
        self._book.void_all(fingerprint)

    def pin_for_lease(self, slots: Slots) -> None:
        self.book.pin(slots)
        self.leased_count += len(slots)

    def unpin_lease(self, slots: Slots) -> None:
        self.book.unpin(slots)
        self.leased_count -= len(slots)

    def row_at(self, slot: int) -> int:
        rows = self._row_of.get(slot // self.book.row_count_max)
        return NOBODY if rows is None else int(rows[slot % self.book.row_count_max])

    def rows_at(self, slots: Slots) -> Rows:
        """Rows of slots that lie in one segment."""
        if not len(slots):
            return np.zeros(0, dtype=np.int32)
        segment, first = divmod(int(slots[0]), self.book.row_count_max)
        rows = self._row_of.get(segment)
        if rows is None:
            return np.full(len(slots), NOBODY, dtype=np.int32)
        found: Rows = rows[slots - np.uint32(int(slots[0]) - first)]
        return found

    def forget_segments(self, segments: Sequence[int]) -> None:
        """These segments have a new life."""
        for segment in segments:
            self._row_of.pop(segment, None)

    def _name(
        self,
        residency: Residency,
        rows: Rows,
        slots: Slots,
        groups: Iterable[Group] | None = None,
    ) -> None:
        """These slots hold the blocks of these rows; `groups` as `by_segment` gives them."""
        columns = self.columns(residency.index)
        columns.slot[rows] = slots
        columns.flags[rows] &= ~(RowFlag.HOT | RowFlag.DIRECT | RowFlag.GIVEN_UP)
        count_max = self.book.row_count_max
        offsets = slots % count_max
        for segment, part in by_segment(slots, count_max) if groups is None else groups:
            if segment not in self._row_of:
                life = self.book.life_of(segment)
                assert life is not None, "a block in a free segment"
                self._row_of[segment] = np.full(life.slot_count, NOBODY, dtype=np.int32)
            self._row_of[segment][offsets[part]] = rows[part]

    # ------------------------------------------------------------------------------- questions

    def recency(self) -> Slots:
        """Slots of all blocks, those of the blocks used least first as far as is known."""
        if self._book is None:
            return np.zeros(0, dtype=np.uint32)
        parts = [
            residency.slots_by_use(self.tier)
            for residency in self._namespaces.values()
            if residency.facts.fingerprint
        ]
        return np.concatenate([np.zeros(0, dtype=np.uint32), *parts])

    def check_invariants(self) -> list[str]:
        if self._book is None:
            return []
        found = self._book.check_invariants()
        for residency in self._namespaces.values():
            index = residency.index
            if residency.sweep_pending:
                continue
            rows = np.fromiter(index.row_of.rows(), np.int32, len(index.row_of))
            column = self.columns(index).slot
            rows = rows[column[rows] != NOBODY]
            slots = column[rows].tolist()
            if len(set(slots)) != len(slots):
                found.append(f"two blocks in one {self.tier} slot")
            if any(
                not self._book.is_ready(slot) or self.row_at(slot) != row
                for slot, row in zip(slots[:10_000], rows[:10_000].tolist(), strict=True)
            ):
                found.append(f"a block's {self.tier} slot does not hold that block")
        return found
