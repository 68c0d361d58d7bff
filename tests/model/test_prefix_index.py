"""The prefix index against a dict of parents; galloping against counting one by one."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.core.index import PrefixIndex
from kvtier.types import BlockHash
from tests.support.machines import machine_settings
from tests.support.world import chain

DEPTH = 5
CHAINS = [chain("".join(path)) for path in product("ab", repeat=DEPTH)]
picks = st.integers(0, len(CHAINS) - 1)


class PrefixIndexMachine(RuleBasedStateMachine):
    """Runs of a chain come, leaves go, subtrees are doomed and swept a bit at a time."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex()
        self.place: dict[BlockHash, int] = {}  # What a caller can still find in the index.
        self.swept: list[int] = []
        self.next_place = 0

    @rule(pick=picks, count=st.integers(1, DEPTH))
    def insert_run(self, pick: int, count: int) -> None:
        hashes = CHAINS[pick]
        start = self.index.match(hashes)
        run = []
        for block in hashes[start : start + count]:
            if block in self.place:
                break  # Below a gap that a doomed block has left.
            run.append(block)
        if not run:
            return
        places = np.arange(self.next_place, self.next_place + len(run), dtype=np.int32)
        parent = int(self.index.rows(hashes[:start])[-1]) if start else None
        rows = self.index.insert_run(run, parent=parent, places=places)
        assert self.index.place[rows].tolist() == places.tolist()
        self.place.update(zip(run, places.tolist(), strict=True))
        self.next_place += len(run)

    @rule(pick=picks)
    def remove_leaf(self, pick: int) -> None:
        hashes = CHAINS[pick][: self.index.match(CHAINS[pick])]
        if not hashes:
            return
        rows = self.index.rows(hashes)
        row = int(rows[-1])
        assert self.index.has_row(row)
        if not self.index.is_leaf(row):
            return
        parent = self.index.remove(row)
        del self.place[hashes[-1]]
        assert not self.index.sweep_pending or parent is None or parent >= 0
        if len(hashes) > 1 and not self.index.sweep_pending:
            expected = int(rows[-2]) if self.is_leaf(hashes[-2]) else None
            assert parent == expected, "the parent's being a leaf was not told"

    @rule(pick=picks, depth=st.integers(0, DEPTH - 1))
    def doom(self, pick: int, depth: int) -> None:
        block = CHAINS[pick][depth]
        if block in self.place:
            row = int(self.index.rows([block])[0])
            self.index.doom(row)
            del self.place[block]
            assert not self.index.has_row(row)

    @rule(count=st.integers(1, 3))
    def sweep(self, count: int) -> None:
        rows, hashes = self.index.sweep(count)
        assert len(rows) <= count
        for block in hashes:
            del self.place[block]
        self.index.forget_rows(rows)

    @rule()
    def sweep_all(self) -> None:
        while self.index.sweep_pending:
            self.sweep(2)
        for hashes in CHAINS:
            for parent, block in pairwise(hashes):
                assert block not in self.place or parent in self.place, "not prefix-closed"

    @invariant()
    def galloping_is_counting(self) -> None:
        assert self.index.check_invariants() == []
        for hashes in CHAINS:
            count = next((i for i, block in enumerate(hashes) if block not in self.place), DEPTH)
            assert self.index.match(hashes) == count
            rows = self.index.rows(hashes)
            assert self.index.place[rows].tolist() == [self.place[one] for one in hashes[:count]]

    def is_leaf(self, block: BlockHash) -> bool:
        return not any(
            block in hashes[:-1] and hashes[hashes.index(block) + 1] in self.place
            for hashes in CHAINS
        )


TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = machine_settings(examples=25, steps=40)
TestPrefixIndex.pytestmark = [pytest.mark.slow, pytest.mark.full_form]
