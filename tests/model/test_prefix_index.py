"""The prefix index against a dict of parents; galloping against counting one by one."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.core.index import IN_CALL, NOBODY, PrefixIndex
from kvtier.types import BlockHash, TierName
from tests.support.machines import machine_settings
from tests.support.world import chain

DEPTH = 5
CHAINS = [chain("".join(path)) for path in product("ab", repeat=DEPTH)]
picks = st.integers(0, len(CHAINS) - 1)
PARENT = {block: parent for hashes in CHAINS for parent, block in pairwise(hashes)}
BLOCKS = list(dict.fromkeys(block for hashes in CHAINS for block in hashes))


class PrefixIndexMachine(RuleBasedStateMachine):
    """Runs of a chain come, trees of any shape are adopted, leaves go, subtrees are doomed and
    swept a bit at a time."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex()
        # What a caller can still find in the index: a place in memory, or a slot on NVMe.
        self.place: dict[BlockHash, int] = {}
        self.lower_slot: dict[BlockHash, int] = {}
        self.next_place = 0

    @rule(pick=picks, count=st.integers(1, DEPTH))
    def insert_run(self, pick: int, count: int) -> None:
        hashes = CHAINS[pick]
        start = self.index.match(hashes)
        run = []
        for block in hashes[start : start + count]:
            if self.is_resident(block):
                break  # Below a gap that a doomed block has left.
            run.append(block)
        if not run:
            return
        places = np.arange(self.next_place, self.next_place + len(run), dtype=np.int32)
        parent = self.row_of(hashes[start - 1]) if start else None
        rows = self.index.insert_run(run, parent=parent, places=places)
        assert self.index.place[rows].tolist() == places.tolist()
        self.place.update(zip(run, places.tolist(), strict=True))
        self.next_place += len(run)

    @rule(blocks=st.lists(st.sampled_from(BLOCKS), unique=True, max_size=12))
    def adopt(self, blocks: list[BlockHash]) -> None:
        chosen: dict[BlockHash, int] = {}
        parents = []
        for block in blocks:
            parent = PARENT.get(block)
            if self.is_resident(block):
                continue
            if parent is None:
                parents.append(NOBODY)
            elif parent in chosen:
                parents.append(IN_CALL - chosen[parent])
            elif self.is_resident(parent):
                parents.append(self.row_of(parent))
            else:
                continue
            chosen[block] = len(chosen)
        slots = np.arange(self.next_place, self.next_place + len(chosen), dtype=np.int64)
        rows = self.index.adopt(
            list(chosen), parents=np.array(parents, dtype=np.int32), lower_slots=slots
        )
        assert (self.index.place[rows] == NOBODY).all()
        self.lower_slot.update(zip(chosen, slots.tolist(), strict=True))
        self.next_place += len(chosen)

    @rule(pick=picks)
    def remove_leaf(self, pick: int) -> None:
        hashes = CHAINS[pick][: self.index.match(CHAINS[pick])]
        if hashes and self.index.is_leaf(self.row_of(hashes[-1])):
            row = self.row_of(hashes[-1])
            assert self.index.has_row(row)
            self.leave(hashes[-1])
            self.index.remove(row)

    @rule(pick=picks, depth=st.integers(0, DEPTH - 1))
    def doom(self, pick: int, depth: int) -> None:
        block = CHAINS[pick][depth]
        if self.is_resident(block):
            row = self.row_of(block)
            self.leave(block)
            self.index.doom(row)
            assert not self.index.has_row(row)

    @rule(count=st.integers(1, 3))
    def sweep(self, count: int) -> None:
        rows, left = self.index.sweep(count)
        assert len(rows) <= count
        for row in left.tolist():
            self.forget(self.index.hash_of[row])
        self.index.forget_rows(rows)

    @rule()
    def sweep_all(self) -> None:
        while self.index.sweep_pending:
            self.sweep(2)
        for block, parent in PARENT.items():
            assert not self.is_resident(block) or self.is_resident(parent), "not prefix-closed"
        for block in BLOCKS:
            if self.is_resident(block):
                self.check_children(block)

    @invariant()
    def galloping_is_counting(self) -> None:
        assert self.index.check_invariants() == []
        for hashes in CHAINS:
            count = next((i for i, one in enumerate(hashes) if not self.is_resident(one)), DEPTH)
            assert self.index.match(hashes) == count
            rows = self.index.rows(hashes)
            here = hashes[:count]
            assert self.index.place[rows].tolist() == [self.place.get(one, -1) for one in here]
            assert self.index.lower[TierName.NVME].slot[rows].tolist() == [
                self.lower_slot.get(one, -1) for one in here
            ]

    # --------------------------------------------------------------------------------- helpers

    def is_resident(self, block: BlockHash) -> bool:
        return block in self.place or block in self.lower_slot

    def row_of(self, block: BlockHash) -> int:
        return int(self.index.rows([block])[0])

    def forget(self, block: BlockHash) -> None:
        assert self.is_resident(block)
        self.place.pop(block, None)
        self.lower_slot.pop(block, None)

    def leave(self, block: BlockHash) -> None:
        """Its replica goes, before it does itself."""
        if block in self.place:
            parent = PARENT.get(block)
            told = self.index.leave_memory([self.row_of(block)])
            siblings = [one for one in self.place if PARENT.get(one) == parent and one != block]
            if parent is not None and not self.index.sweep_pending:
                assert told == (None if siblings else self.row_of(parent)), (
                    "the parent was not told"
                )
        self.forget(block)

    def check_children(self, block: BlockHash) -> None:
        """While nothing is doomed, the children are those that are resident, in a sound list."""
        index, row = self.index, self.row_of(block)
        found: list[int] = []
        child = int(index._first_child[row])
        while child != NOBODY:
            assert int(index._previous_sibling[child]) == (found[-1] if found else NOBODY)
            found.append(child)
            child = int(index._next_sibling[child])
        mine = [one for one, parent in PARENT.items() if parent == block and self.is_resident(one)]
        assert sorted(found) == sorted(map(self.row_of, mine))
        assert index.memory_children[row] == sum(one in self.place for one in mine)


TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = machine_settings(examples=25, steps=40)
TestPrefixIndex.pytestmark = [pytest.mark.slow, pytest.mark.full_form]
