"""What is resident of one namespace: its index, its slots and its eviction policy, kept in step.

Sessions, leases and slabs are the manager's business; here are blocks only. Order of effects: a
block leaves the index before its slot is freed, and enters it after its slot is known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.core.index import NOBODY, PrefixIndex, Rows
from kvtier.core.replica import Places, ReplicaState
from kvtier.core.tiers import MemoryTier
from kvtier.policy.eviction import Evictable, EvictionPolicy
from kvtier.types import BlockHash, CommitOutcome, Cut, NamespaceId, SlabSetId


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    namespace: NamespaceId
    hash_bytes: int
    slot_bytes: int
    shard_count: int

    @property
    def block_bytes(self) -> int:
        """What one block takes of the pool, padding included."""
        return self.slot_bytes * self.shard_count


@dataclass(frozen=True, slots=True)
class LeasedSlice:
    """What one slice of Acquire pinned."""

    places: Places
    cut: Cut


@dataclass(frozen=True, slots=True)
class CommittedSlice:
    """What one slice of Commit did; the lists are of the blocks that became READY."""

    outcomes: bytes
    ready: Places
    ready_positions: list[int]  # Positions in the slice.
    hashes: list[BlockHash]
    parents: list[BlockHash | None]

    def runs(self) -> list[tuple[list[BlockHash], BlockHash | None]]:
        """The READY blocks in runs that follow one another: (hashes, parent of the first)."""
        found: list[tuple[list[BlockHash], BlockHash | None]] = []
        for block, parent in zip(self.hashes, self.parents, strict=True):
            if found and found[-1][0][-1] == parent:
                found[-1][0].append(block)
            else:
                found.append(([block], parent))
        return found


class Residency:
    """Invariant: a block is in the index if and only if its place is READY or LEAVING."""

    def __init__(
        self,
        facts: NamespaceFacts,
        *,
        epoch: int,
        set_slot_count: int,
        make_policy: Callable[[], EvictionPolicy],
    ) -> None:
        self.facts = facts
        self.epoch = epoch
        self.index = PrefixIndex()
        self.tier = MemoryTier(set_slot_count)
        self.evicted_count = 0
        self.void_count = 0  # Rises whenever resident blocks are voided.
        self._make_policy = make_policy
        self._policy = make_policy()
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
        """Pin the leading resident blocks of `hashes`, which follow block `after`.

        Blocks from position `mapped_from` on must lie in one of the `usable` slab sets. Stops at
        the first gap, also where a block does not follow the one before it.
        """
        rows = self.index.rows(hashes)
        cut = Cut.NONE if len(rows) == len(hashes) else Cut.MISS
        straight = self._straight_count(rows, after)
        if straight < len(rows):
            rows, cut = rows[:straight], Cut.MISS
        places = self.index.place[rows]
        mapped = self._mapped_count(places, mapped_from, usable)
        if mapped < len(places):
            places, cut = places[:mapped], Cut.UNMAPPED
        room = self.tier.lease_room(places, limit_count)
        if room < len(places):
            places, cut = places[:room], Cut.PIN_LIMIT
        self.tier.pin_for_lease(places)
        self._policy.on_touch(rows[: len(places)], now)
        return LeasedSlice(places, cut)

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
        """Publish reserved slots under `hashes`, which follow `parent`; frees those not needed."""
        outcomes = bytearray(len(hashes))
        is_void = (self.tier.state[places] == ReplicaState.GONE).tolist()
        row_of = self.index.row_of
        run = _Run(parent_row=None if parent is None else row_of.get(parent))
        has_parent = parent is None or run.parent_row is not None
        positions: list[int] = []
        parents: list[BlockHash | None] = []
        previous = parent
        for position, block in enumerate(hashes):
            if block in run.hashes:
                self._insert(run, places, now)
            row = row_of.get(block)
            if row is not None:
                self._insert(run, places, now)
                outcomes[position] = CommitOutcome.PRESENT
                run.parent_row, has_parent = row, True
                self._policy.on_touch(np.array([row], dtype=np.int32), now)
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
        ready = places[np.array(positions, dtype=np.int64)]
        rejected = np.ones(len(places), dtype=np.bool_)
        rejected[positions] = False
        self.tier.abort(places[rejected])
        return CommittedSlice(
            bytes(outcomes), ready, positions, [hashes[one] for one in positions], parents
        )

    # -------------------------------------------------------------------------------- evicting

    def evict(self, count: int) -> list[BlockHash]:
        """Evict up to `count` blocks that the policy nominates; returns their hashes."""
        hashes: list[BlockHash] = []
        places: list[int] = []
        for row in self._policy.nominate(count, self._verdict):
            self._take_out(row, hashes, places)
        self.tier.drop(np.array(places, dtype=np.int32))
        return hashes

    def evict_prefix(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Evict these resident blocks of one chain, last first, up to the first that is held."""
        evicted: list[BlockHash] = []
        places: list[int] = []
        for block in reversed(hashes):
            row = self.index.row_of.get(block)
            if row is None or self._verdict(row) is not Evictable.YES:
                break
            self._take_out(row, evicted, places)
        self.tier.drop(np.array(places, dtype=np.int32))
        return evicted

    def end_user_session(self, hashes: Sequence[BlockHash]) -> bool:
        return self._policy.on_session_end(self.index.rows(hashes))

    # --------------------------------------------------------------------------------- voiding

    def void_places(self, places: Places) -> list[BlockHash]:
        """Void these replicas at once; the blocks that depend on them become unreachable.

        Returns the hashes of the blocks named. `sweep` frees the rest.
        """
        hashes = []
        for row in self.tier.row[places].tolist():
            if row == NOBODY or not self.index.has_row(row):
                continue  # Nothing there, or doomed already.
            block = self.index.hash_of[row]
            assert block is not None, "a resident row without its hash"
            hashes.append(block)
            parent = self.index.doom(row)
            if parent is not None:
                self._policy.on_leaf(parent)
        self.void_count += len(hashes)
        filling = places[self.tier.state[places] == ReplicaState.RESERVED]
        self.tier.void(filling)
        return hashes

    def clear(self, epoch: int) -> int:
        """Void everything; returns how many blocks that were. `sweep` frees the slots."""
        voided_count = len(self.index.row_of)
        self.tier.void_all()
        self._trash.append(self.index)
        self.index = PrefixIndex()
        self._policy = self._make_policy()
        self.epoch = epoch
        self.void_count += 1
        return voided_count

    def sweep(self, count: int) -> list[BlockHash]:
        """Free up to `count` blocks that became unreachable; returns the hashes that went."""
        if self.tier.free_pending:
            self.tier.free_some()
            return []
        rows, hashes = self.index.sweep(count)
        if len(rows):
            self.tier.void(self.index.place[rows])
            self._policy.on_remove(rows.tolist())
            self.index.forget_rows(rows)
        elif self._trash and self._trash[-1].dismantle(count):
            self._trash.pop()
        return hashes

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
        if (places == NOBODY).any() or (self.tier.row[places] != rows).any():
            found.append("a block's place does not hold that block")
        if int((self.tier.row != NOBODY).sum()) != len(rows):
            found.append("a slot holds a block that is not in the index")
        return [f"namespace {self.facts.namespace}: {one}" for one in found]

    # --------------------------------------------------------------------------------- helpers

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
        crooked = np.flatnonzero(self.index.parent[rows] != expected)
        return int(crooked[0]) if len(crooked) else len(rows)

    def _mapped_count(
        self, places: Places, mapped_from: int, usable: Collection[SlabSetId] | None
    ) -> int:
        if usable is None or mapped_from >= len(places):
            return len(places)
        allocator = self.tier.allocator
        mask = np.zeros(allocator.place_count // allocator.set_slot_count, dtype=np.bool_)
        mask[allocator.ordinals_of(usable)] = True
        unmapped = np.flatnonzero(~mask[places[mapped_from:] // allocator.set_slot_count])
        return mapped_from + int(unmapped[0]) if len(unmapped) else len(places)

    def _insert(self, run: _Run, places: Places, now: float) -> None:
        """Insert the blocks that `run` has gathered; the run then goes on after the last one."""
        if not run.hashes:
            return
        mine = places[np.fromiter(run.hashes.values(), np.int64, len(run.hashes))]
        rows = self.index.insert_run(list(run.hashes), parent=run.parent_row, places=mine)
        self.tier.commit(mine, rows)
        self._policy.on_insert(rows, now)
        last = int(rows[-1])
        self._policy.on_leaf(last)
        run.hashes.clear()
        run.parent_row = last

    def _verdict(self, row: int) -> Evictable:
        # A doomed row must not be taken out twice; it leaves the policy when it is swept.
        if not self.index.has_row(row) or not self.index.is_leaf(row):
            return Evictable.INNER
        if self.tier.is_pinned(int(self.index.place[row])):
            return Evictable.HELD
        return Evictable.YES

    def _take_out(self, row: int, hashes: list[BlockHash], places: list[int]) -> None:
        block = self.index.hash_of[row]
        assert block is not None, "a policy nominated a block that is gone"
        hashes.append(block)
        places.append(int(self.index.place[row]))
        parent = self.index.remove(row)
        self._policy.on_remove([row])
        if parent is not None:
            self._policy.on_leaf(parent)
        self.evicted_count += 1


class _Run:
    """New blocks of a Commit that follow one another, not yet in the index."""

    __slots__ = ("hashes", "parent_row")

    def __init__(self, parent_row: int | None) -> None:
        self.hashes: dict[BlockHash, int] = {}  # Position in the slice.
        self.parent_row = parent_row
