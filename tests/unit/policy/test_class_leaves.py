"""Leaves of classes: chains go at a time exactly as their blocks would one by one."""

from __future__ import annotations

import numpy as np

from kvtier.policy.class_leaves import Leaves, Times
from kvtier.policy.eviction import ChainOf, Evictable, alone, only_children

KINDS = 3
TURNS, ROWS = 90, 90 * 80


class ByKind:
    """In steps, as in a table; two classes are alike, and of one the youngest goes first."""

    def of(self, kind: int, used_at: float) -> float:
        step = float(used_at // 4)
        return 3.0 - step if kind == 1 else step

    def of_all(self, used_at: Times) -> Times:
        each = enumerate(used_at.tolist())
        return np.array([self.of(place // 2, at) for place, at in each])


class Forest:
    """Chains of up to 80 blocks that branch off one another, in a cache that is always full."""

    def __init__(self, chain_of: ChainOf | None) -> None:
        self.leaves, self.chance = Leaves(), np.random.default_rng(5)
        # Rows of a chain do not follow one another: where times are equal, they decide.
        self.spare = self.chance.permutation(ROWS)
        self.parent, self.children = [-1] * ROWS, [0] * ROWS
        self.leaves.make_room(ROWS)
        self.resident: list[int] = []
        self.gone: list[int] = []
        self.chain_of = chain_of or self.with_its_chain

    def with_its_chain(self, row: int, count: int) -> list[int]:
        return only_children(row, count, self.parent, self.children)

    def may_evict(self, row: int) -> Evictable:
        return Evictable.INNER if self.children[row] else Evictable.YES

    def grow(self, now: float) -> None:
        chance = self.chance
        above = int(chance.choice(self.resident)) if self.resident and chance.random() < 0.5 else -1
        count = int(chance.integers(1, 80))
        rows, self.spare = self.spare[:count], self.spare[count:]
        for row in rows.tolist():
            self.parent[row] = above
            if above >= 0:
                self.children[above] += 1
            above = row
        self.resident += rows.tolist()
        kind = np.full(count, chance.integers(0, KINDS), np.int16)
        self.leaves.insert(rows, np.full(count, now // 5), kind)
        self.leaves.add(above)

    def use(self, now: float) -> None:
        leaves = [row for row in self.resident if not self.children[row]]
        row, chain = int(self.chance.choice(leaves)), []
        while row >= 0:
            chain.append(row)
            row = self.parent[row]
        # Requests of one moment are told apart by rows alone; the head of a chain is shared.
        kinds = np.full(len(chain), self.chance.integers(0, KINDS), np.int16)
        kinds[: len(chain) // 2] = self.chance.integers(0, KINDS)
        self.leaves.move(np.array(chain[::-1]), now // 5, kinds)

    def evict(self, count: int) -> None:
        for rows in self.leaves.nominate(count, self.may_evict, self.chain_of, ByKind()):
            self.leaves.remove(rows)
            self.gone.extend(rows)
            for row in rows:
                self.resident.remove(row)
                above = self.parent[row]
                self.children[row] = 0
                if above >= 0:
                    self.children[above] -= 1
            above = self.parent[rows[-1]]
            if above >= 0 and not self.children[above]:
                self.leaves.add(above)


def victims(chain_of: ChainOf | None) -> list[int]:
    forest = Forest(chain_of)
    for turn in range(TURNS):
        forest.grow(float(turn))
        forest.use(float(turn))
        forest.evict(max(0, len(forest.resident) - 300))
    return forest.gone


def test_chains_go_at_a_time_as_their_blocks_would_one_by_one() -> None:
    one_by_one = victims(alone)
    assert len(one_by_one) > 1000
    assert victims(None) == one_by_one


def test_block_that_a_chain_grew_from_does_not_part_it() -> None:
    leaves = Leaves()
    leaves.make_room(64)
    first, more = np.arange(20), np.arange(20, 40)
    leaves.insert(first, np.full(20, 1.0), np.ones(20, np.int16))
    leaves.add(19)  # It was a leaf, and nobody says that it is none any more.
    leaves.move(first, 2.0, 1)
    leaves.insert(more, np.full(20, 2.0), np.ones(20, np.int16))
    leaves.add(39)
    leaves.insert(np.array([50]), np.full(1, -8.0), np.ones(1, np.int16))
    leaves.add(50)  # The oldest, and worth more.

    def may_evict(row: int) -> Evictable:
        return Evictable.YES if row in (39, 50) else Evictable.INNER

    parts = leaves.nominate(40, may_evict, lambda row, count: range(row, -1, -1), ByKind())
    assert [len(rows) for rows in parts] == [40]
