"""What is resident of one namespace: its index, its slots and its eviction policy, kept in step.

Sessions, leases and slabs are the manager's business; here are blocks only. Order of effects: a
block leaves the index before its slot is freed, and enters it after its slot is known.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from kvtier.core.index import NOBODY, USES_MAX, PrefixIndex, RowFlag, Rows
from kvtier.core.learning import IndexedBlocks, rows_and_keys
from kvtier.core.leaving import Leaving, is_in_memory
from kvtier.core.namespace_facts import NamespaceFacts
from kvtier.core.replica import RESERVED, Places
from kvtier.core.runs import Run
from kvtier.core.slices import CommittedSlice, LeasedSlice, Lost
from kvtier.core.slots import Slots
from kvtier.core.tiers import MemoryTier
from kvtier.policy.eviction import ForecastingPolicy, LearningPolicy, PolicyMaker
from kvtier.types import BlockHash, CommitOutcome, Cut, PrefixMatch, Presence, SlabSetId, TierName


class Residency:
    """Invariants: a block is in the index if and only if it has a READY replica, in memory or in a
    tier below; `place` names the one in memory, or the slot that it is being promoted into."""

    def __init__(
        self,
        facts: NamespaceFacts,
        *,
        epoch: int,
        set_slot_count: int,
        make_policy: PolicyMaker,
        lower: Sequence[TierName] = (TierName.NVME,),
    ) -> None:
        self.facts = facts
        self.epoch = epoch
        self._lower = lower
        self.index = self._make_index()
        self.tier = MemoryTier(set_slot_count)
        self.is_erasing = False  # It is given no slots meanwhile.
        self.evicted_count = 0
        self.void_count = 0  # Rises whenever resident blocks are voided.
        self._make_policy = make_policy
        self._begin_policy()
        self._trash: list[PrefixIndex] = []

    # --------------------------------------------------------------------------------- leasing

    def lease(
        self,
        hashes: Sequence[BlockHash],
        *,
        after: BlockHash | None,
        mapped_from: int,
        usable: Collection[SlabSetId] | None,
        limit_count: int,
        now: float,
    ) -> LeasedSlice:
        """Pin the leading blocks of `hashes`, which follow block `after`, that are in memory.

        Blocks from position `mapped_from` on must lie in one of the `usable` slab sets; those
        before it need not be in memory. Stops at the first gap, also where a block does not follow
        the one before it; the cut is DEADLINE where the next block is in tiers below only.
        """
        rows, cut = self.straight_rows(hashes, after)
        places = self.index.place[rows]
        ready = self.tier.is_ready(places)
        absent = ready[mapped_from:].argmin() if len(ready) > mapped_from else 0
        if len(ready) > mapped_from and not ready[mapped_from + absent]:
            places, cut = places[: mapped_from + int(absent)], Cut.DEADLINE
        if mapped_from:
            places = np.where(ready[: len(places)], places, np.int32(NOBODY))
        mapped = self.mapped_count(places, mapped_from, usable)
        if mapped < len(places):
            places, cut = places[:mapped], Cut.UNMAPPED
        room = self.tier.lease_room(places, limit_count)
        if room < len(places):
            places, cut = places[:room], Cut.PIN_LIMIT
        rows = rows[: len(places)]
        self.tier.pin_for_lease(places[places >= 0])
        self.note_use(rows, now)
        return LeasedSlice(rows, places, cut)

    def straight_rows(
        self, hashes: Sequence[BlockHash], after: BlockHash | None
    ) -> tuple[Rows, Cut]:
        """Rows of the leading resident blocks that follow one another, the first one `after`."""
        rows = self.index.rows(hashes)
        cut = Cut.NONE if len(rows) == len(hashes) else Cut.MISS
        if not self.facts.chained:
            return rows, cut
        straight = self._straight_count(rows, after)
        return (rows[:straight], Cut.MISS) if straight < len(rows) else (rows, cut)

    def touch(self, rows: Rows, now: float) -> None:
        """These blocks, in chain order, were used, by no request for them."""
        self.note_use(rows, now)
        self.keep(rows, now)

    def note_request(self, places: Places, hashes: Sequence[BlockHash], now: float) -> None:
        """A request asked for this chain; these are the places of its leading blocks, which
        `note_use` was told of."""
        self.policy.on_request(*rows_and_keys(self, places, hashes), now)

    def note_use(self, rows: Rows, now: float) -> None:
        index = self.index
        index.uses[rows] += index.uses[rows] < USES_MAX
        for columns in index.lower.values():
            columns.flags[rows] |= RowFlag.HOT
        index.used_at[rows] = now

    def keep(self, rows: Rows, now: float) -> None:
        """These blocks will be used soon: not those to evict first."""
        self.policy.on_touch(rows[self.tier.is_ready(self.index.place[rows])], now)

    def presence(self, hashes: Sequence[BlockHash]) -> PrefixMatch:
        """Of each block by itself where it is; the counts are of the leading run."""
        index, found = self.index, bytearray(len(hashes))
        for position, row in enumerate(index.row_of.get_all(hashes)):
            if row is not None:
                found[position] = Presence.MEMORY if self.is_in_memory(row) else Presence.LOWER
        count = len(found) if Presence.ABSENT not in found else found.index(Presence.ABSENT)
        run = found[:count]
        memory_count = count if Presence.LOWER not in run else run.index(Presence.LOWER)
        return PrefixMatch(count, memory_count, presence=bytes(found))

    def memory_count(self, hashes: Sequence[BlockHash], count: int) -> int:
        """How many of the first `count` blocks, all resident, lead in memory.

        By halving: the tail goes first, so what is in memory is as a rule a prefix. Where it is
        not, the answer is that of one of its edges; a hint, like all of a match.
        """
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            row = self.index.row_of.get(hashes[middle])
            if row is not None and self.is_in_memory(row):
                low = middle + 1
            else:
                high = middle
        return low

    def is_in_memory(self, row: int) -> bool:
        return is_in_memory(self.index, self.tier, row)

    # ------------------------------------------------------------------------------ committing

    def commit(
        self,
        hashes: Sequence[BlockHash],
        places: Places,
        *,
        parent: BlockHash | None,
        void: bool,
        now: float,
    ) -> CommittedSlice:
        """Publish reserved slots under `hashes`, which follow `parent` and one another, or nothing
        in an unchained namespace; frees those not needed."""
        outcomes = bytearray(len(hashes))
        is_void = self.tier.are_gone(places).tolist()
        row_of = self.index.row_of
        chained = self.facts.chained
        parent = parent if chained else None
        run = Run(parent_row=None if parent is None else row_of.get(parent))
        has_parent = parent is None or run.parent_row is not None
        positions: list[int] = []
        parents: list[BlockHash | None] = []
        present: list[int] = []
        previous = parent
        for position, block in enumerate(hashes):
            if not chained:
                self._insert(run, places, now)
                run.parent_row, has_parent, previous = None, True, None
            elif block in run.hashes:
                self._insert(run, places, now)
            row = row_of.get(block)
            if row is not None:
                self._insert(run, places, now)
                outcomes[position] = CommitOutcome.PRESENT
                run.parent_row, has_parent = row, True
                present.append(row)
            elif void or is_void[position]:
                self._insert(run, places, now)
                outcomes[position], has_parent = CommitOutcome.VOID, False
            elif has_parent:
                run.hashes[block] = position
                positions.append(position)
                parents.append(previous)
            else:
                outcomes[position] = CommitOutcome.NO_PARENT
            previous = block
        self._insert(run, places, now)
        self.touch(np.array(present, dtype=np.int32), now)
        ready = places[np.array(positions, dtype=np.int64)]
        rejected = places != NOBODY
        rejected[positions] = False
        self.tier.abort(places[rejected])
        return CommittedSlice(
            bytes(outcomes), ready, positions, [hashes[one] for one in positions], parents
        )

    # ------------------------------------------------------------------------------- promoting

    def begin_promotion(self, rows: Rows, places: Places) -> None:
        """These blocks, in tiers below only, are read into these slots, reserved by the daemon."""
        self.index.place[rows] = places
        self.tier.row[places] = rows

    def end_promotion(self, places: Places, now: float) -> Rows:
        """The blocks in these slots, all RESERVED for their rows, are in memory now."""
        rows = self.tier.row[places]
        self.tier.commit(places, rows)
        self.tier.summed[places] = True
        self.index.enter_memory(rows)
        self.policy.on_insert(rows, now)
        for row in rows[self.index.memory_children[rows] == 0].tolist():
            self.policy.on_leaf(row)
        return rows

    def abort_promotion(self, places: Places) -> None:
        """Nothing comes into these slots; some may have been voided meanwhile."""
        rows = self.tier.row[places]
        mine = rows[rows != NOBODY]
        self.index.place[mine] = NOBODY
        self.tier.abort(places)

    # -------------------------------------------------------------------------------- adopting

    def adopt(self, rows: Rows, places: Places, now: float) -> None:
        """These blocks, not in memory so far, were found in these held slots. None of them is
        nominated for eviction before `announce_leaves`."""
        self.tier.adopt_ready(places, rows)
        self.index.place[rows] = places
        self.index.enter_memory(rows)
        self.index.used_at[rows] = now
        self.policy.on_insert(rows, now)

    def announce_leaves(self, places: Places) -> None:
        rows = self.tier.row[places[self.tier.is_ready(places)]]
        for row in rows[self.index.memory_children[rows] == 0].tolist():
            self.policy.on_leaf(row)

    # -------------------------------------------------------------------------------- evicting

    def evict(self, count: int) -> list[BlockHash]:
        """Evict up to `count` blocks that the policy nominates from memory; returns their hashes.

        What has a copy in a tier below stays resident there.
        """
        hashes: list[BlockHash] = []
        places: list[int] = []
        if count < 1:
            return hashes
        leaving = Leaving(self.index, self.tier)
        for victims in self.policy.nominate(count, leaving.may_evict, leaving.chain_of):
            rows = list(victims)
            hashes.extend(map(self._hash, rows))
            places.extend(map(self.index.place.item, rows))
            self._leave_memory(rows)
            self.evicted_count += len(rows)
        self.tier.drop(np.array(places, dtype=np.int32))
        return hashes

    def evict_prefix(self, hashes: Sequence[BlockHash]) -> tuple[int, Lost]:
        """Evict these resident blocks of one chain from every tier, last first, up to the first
        that is held; how many."""
        count = 0
        lost = Lost()
        for block in reversed(hashes):
            row = self.index.row_of.get(block)
            if row is None or not self._may_go(row):
                break
            for tier, columns in self.index.lower.items():
                slot = int(columns.slot[row])
                if slot != NOBODY:
                    columns.slot[row] = NOBODY
                    lost.note_lower(tier, [block], [slot])
            place = int(self.index.place[row])
            if place != NOBODY:
                lost.from_memory.append(block)
                self._leave_memory([row])
                self.tier.drop(np.array([place], dtype=np.int32))
            else:
                self.index.remove(row)
            count += 1
        self.evicted_count += count
        return count, lost

    def end_user_session(self, hashes: Sequence[BlockHash]) -> bool:
        rows = self.index.rows(hashes)
        return self.policy.on_session_end(rows[self.tier.is_ready(self.index.place[rows])])

    # --------------------------------------------------------------------------------- voiding

    def void_places(self, places: Places) -> list[BlockHash]:
        """Void these replicas in memory at once. A block without a copy below is not resident any
        more, and the blocks that depend on it become unreachable.

        Returns the hashes of the blocks named. `sweep` frees what became unreachable.
        """
        hashes = []
        for place in places[self.tier.row[places] != NOBODY].tolist():
            row = int(self.tier.row[place])
            if self.tier.state[place] == RESERVED:
                self.index.place[row] = NOBODY  # It was being promoted; it still is below.
                continue
            if not self.index.has_row(row):
                continue  # Doomed already: the sweep will void it.
            hashes.append(self._hash(row))
            self._leave_memory([row])
            self.tier.void(np.array([place], dtype=np.int32))
        self.void_count += len(hashes)
        filling = places[self.tier.state[places] == RESERVED]
        self.tier.void(filling)
        return hashes

    def leave_lower(self, tier: TierName, row: int) -> None:
        """The block's copy in this tier is gone: its last replica, unless there are others."""
        self.index.lower[tier].slot[row] = NOBODY
        if not self.is_in_memory(row) and not self.index.is_lower(row):
            # A slot that it is being promoted into is voided by the sweep.
            self.index.doom(row)
            self.void_count += 1

    def clear(self, epoch: int) -> int:
        """Void everything; returns how many blocks that were. `sweep` frees the slots."""
        voided_count = len(self.index.row_of)
        self.tier.void_all()
        self._trash.append(self.index)
        self.index = self._make_index()
        self._begin_policy()
        self.epoch = epoch
        self.void_count += 1
        return voided_count

    def sweep(self, count: int) -> Lost:
        """Free up to `count` blocks that became unreachable."""
        lost = Lost()
        if self.tier.free_pending:
            self.tier.free_some()
            return lost
        index = self.index
        rows, left = index.sweep(count)
        if len(rows):
            lost.from_memory.extend(self.hashes_of(left[self.tier.is_ready(index.place[left])]))
            places = index.place[rows]
            # The policy knows of no others: what never was in memory has no row there.
            self.policy.on_remove(rows[self.tier.is_ready(places)].tolist())
            self.tier.void(places[places != NOBODY])
            for tier, columns in index.lower.items():
                slots = columns.slot[rows]
                lost.note_lower(
                    tier,
                    self.hashes_of(left[columns.slot[left] != NOBODY]),
                    slots[slots != NOBODY].tolist(),
                )
            index.forget_rows(rows)
            self.void_count += len(left)
        elif self._trash and self._trash[-1].dismantle(count):
            self._trash.pop()
        return lost

    @property
    def change_count(self) -> int:
        """Rises whenever a block leaves the index."""
        return self.void_count + self.evicted_count

    def slots_by_use(self, tier: TierName) -> Slots:
        """Slots of the copies in this tier: of the blocks used seldom first, then as they lie."""
        index = self.index
        column = index.lower[tier].slot
        rows = np.fromiter(index.row_of.rows(), np.int32, len(index.row_of))
        rows = rows[column[rows] != NOBODY]
        order = np.lexsort((column[rows], index.used_at[rows]))
        slots: Slots = column[rows][order].astype(np.uint32)
        return slots

    @property
    def leased_bytes(self) -> int:
        return self.tier.leased_count * self.facts.block_bytes

    @property
    def sweep_pending(self) -> bool:
        return self.tier.free_pending or self.index.sweep_pending or bool(self._trash)

    def check_invariants(self) -> list[str]:
        found = self.index.check_invariants() + self.tier.check_invariants()
        if self.index.sweep_pending:
            return found
        rows = np.fromiter(self.index.row_of.rows(), np.int32, len(self.index.row_of))
        places = self.index.place[rows]
        held = places != NOBODY
        if (self.tier.row[places[held]] != rows[held]).any():
            found.append("a block's place does not hold that block")
        if int((self.tier.row != NOBODY).sum()) != int(held.sum()):
            found.append("a slot holds a block that is not in the index")
        ready = self.tier.is_ready(places)
        if (~ready & ~self.index.are_lower(rows)).any():
            found.append("a block is resident that has no READY replica")
        children = np.zeros(len(self.index.hash_of) + 1, dtype=np.int32)
        np.add.at(children, self.index.parent[rows[ready]], 1)
        if (children[rows] != self.index.memory_children[rows]).any():
            found.append("a block counts its children in memory wrongly")
        return [f"namespace {self.facts.namespace}: {one}" for one in found]

    # --------------------------------------------------------------------------------- helpers

    def _begin_policy(self) -> None:
        self.policy = policy = self._make_policy(IndexedBlocks(self.index, self.facts))
        # What else it can do; asked here, for each asking takes as long as an eviction.
        self.learning = policy if isinstance(policy, LearningPolicy) else None
        self.forecasting = policy if isinstance(policy, ForecastingPolicy) else None

    def _make_index(self) -> PrefixIndex:
        return PrefixIndex(self._lower, chained=self.facts.chained)

    def _straight_count(self, rows: Rows, after: BlockHash | None) -> int:
        """How many of `rows` follow one another, the first one following block `after`."""
        if not len(rows):
            return 0
        before = NOBODY if after is None else self.index.row_of.get(after)
        if before is None:
            return 0
        expected = np.empty_like(rows)
        expected[0] = before
        expected[1:] = rows[:-1]
        crooked = self.index.parent.take(rows) != expected
        first = int(crooked.argmax())
        return first if crooked[first] else len(rows)

    def mapped_count(
        self, places: Places, mapped_from: int, usable: Collection[SlabSetId] | None
    ) -> int:
        if usable is None or mapped_from >= len(places):
            return len(places)
        allocator = self.tier.allocator
        ordinals = allocator.ordinals_of(usable)
        mask = np.zeros(allocator.place_count // allocator.set_slot_count, dtype=np.bool_)
        if len(ordinals) == len(mask):
            return len(places)
        mask[ordinals] = True
        unmapped = np.flatnonzero(~mask[places[mapped_from:] // allocator.set_slot_count])
        return mapped_from + int(unmapped[0]) if len(unmapped) else len(places)

    def _insert(self, run: Run, places: Places, now: float) -> None:
        """Insert the blocks that `run` has gathered; the run then goes on after the last one."""
        if not run.hashes:
            return
        mine = places[np.fromiter(run.hashes.values(), np.int64, len(run.hashes))]
        rows = self.index.insert_run(list(run.hashes), parent=run.parent_row, places=mine)
        self.tier.commit(mine, rows)
        self.index.used_at[rows] = now
        self.policy.on_insert(rows, now)
        last = int(rows[-1])
        self.policy.on_leaf(last)
        run.hashes.clear()
        run.parent_row = last

    def _may_go(self, row: int) -> bool:
        """Whether nothing depends on the block and nobody holds it."""
        place = int(self.index.place[row])
        held = place != NOBODY and (not self.is_in_memory(row) or self.tier.is_pinned(place))
        return self.index.is_leaf(row) and not held

    def _leave_memory(self, rows: list[int]) -> None:
        """The READY replicas in memory of a chain, its last block first, go; the caller ends them
        in the tier."""
        parent = Leaving(self.index, self.tier).leave(rows, self.policy)
        if parent is not None and self.is_in_memory(parent):
            self.policy.on_leaf(parent)

    def named(self, rows: Rows) -> tuple[list[BlockHash], list[BlockHash | None]]:
        """The hashes of these resident blocks, and those of their parents."""
        hash_of = self.index.hash_of
        parents = self.index.parent[rows].tolist()
        return self.hashes_of(rows), [
            None if parent == NOBODY else hash_of[parent] for parent in parents
        ]

    def hashes_of(self, rows: Rows) -> list[BlockHash]:
        return [self._hash(row) for row in rows.tolist()]

    def _hash(self, row: int) -> BlockHash:
        block = self.index.hash_of[row]
        assert block is not None, "a resident row without its hash"
        return block
