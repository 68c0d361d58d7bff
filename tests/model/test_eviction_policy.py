"""LRU against the simplest thing that could be right: the oldest leaf of a dict of use times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvtier.policy.curves import CurvesPolicy
from kvtier.policy.eviction import (
    TURN_KINDS_MAX,
    Evictable,
    EvictionPolicy,
    TurnKindPolicy,
    alone,
)
from kvtier.policy.lru import LruPolicy
from tests.support.machines import machine_settings
from tests.support.policy_blocks import FakeBlocks

picks = st.integers(0, 63)


class EvictionPolicyMachine(RuleBasedStateMachine):
    """A forest of blocks; every nomination must be the leaf with the oldest time, lowest row."""

    def make_policy(self) -> EvictionPolicy:
        return LruPolicy()

    @initialize()
    def start(self) -> None:
        self.policy = self.make_policy()
        self.now = 0.0
        self.used_at: dict[int, float] = {}
        self.parent: dict[int, int | None] = {}
        self.held: set[int] = set()

    @rule(count=st.integers(1, 4), under=picks)
    def insert_run(self, count: int, under: int) -> None:
        self.now += 1.0
        spare = [row for row in range(len(self.parent) + count) if row not in self.parent]
        rows = spare[:count]
        known = sorted(self.parent)
        parent = known[under % len(known)] if known and under % 3 else None
        for row in rows:
            self.parent[row], self.used_at[row] = parent, self.now
            parent = row
        self.policy.on_insert(np.array(rows, dtype=np.int32), self.now)
        self.policy.on_leaf(rows[-1])

    @rule(pick=picks)
    def touch(self, pick: int) -> None:
        self.now += 1.0
        rows = self.prefix(pick)
        self.policy.on_touch(np.array(rows, dtype=np.int32), self.now)
        self.used_at.update(dict.fromkeys(rows, self.now))

    @rule(pick=picks)
    def end_session(self, pick: int) -> None:
        rows = self.prefix(pick)
        self.policy.on_session_end(np.array(rows, dtype=np.int32))
        self.used_at.update(dict.fromkeys(rows, -np.inf))

    @rule(pick=picks)
    def tell_kind(self, pick: int) -> None:
        if isinstance(self.policy, TurnKindPolicy):
            rows = np.array(self.prefix(pick), dtype=np.int32)
            self.policy.on_turn_kind(rows, np.zeros(0, np.uint64), 1 + pick % TURN_KINDS_MAX)

    @rule(pick=picks)
    def hold(self, pick: int) -> None:
        self.held ^= set(self.prefix(pick)[-1:])

    @rule(pick=picks)
    def void_subtree(self, pick: int) -> None:
        for root in self.prefix(pick)[-1:]:
            gone = {root}
            for _ in self.parent:
                gone |= {row for row, parent in self.parent.items() if parent in gone}
            parent = self.parent[root]
            for row in gone:
                self.forget(row)
            self.policy.on_remove(sorted(gone))
            if parent is not None and not self.has_children(parent):
                self.policy.on_leaf(parent)

    @rule(count=st.integers(1, 4), evict=st.booleans())
    def nominate(self, count: int, evict: bool) -> None:
        passed: set[int] = set()
        nominated = 0
        chain_of = self.chain_of if evict else alone
        for rows in self.policy.nominate(count, self.verdict, chain_of):
            parent: int | None = None
            for row in rows:
                assert row == self.oldest_leaf(passed), "not the leaf used longest ago"
                nominated += 1
                if evict:
                    parent = self.parent[row]
                    self.forget(row)
                else:
                    passed.add(row)
            if not evict:
                continue
            self.policy.on_remove(rows)
            if parent is not None and not self.has_children(parent):
                self.policy.on_leaf(parent)
        if nominated < count:
            assert self.oldest_leaf(passed) is None, "a leaf was forgotten"

    # --------------------------------------------------------------------------------- helpers

    def has_children(self, row: int) -> bool:
        return row in self.parent.values()

    def prefix(self, pick: int) -> list[int]:
        known = sorted(self.parent)
        row: int | None = known[pick % len(known)] if known else None
        rows: list[int] = []
        while row is not None:
            rows.insert(0, row)
            row = self.parent[row]
        return rows

    def forget(self, row: int) -> None:
        del self.parent[row], self.used_at[row]
        self.held.discard(row)

    def chain_of(self, row: int, count: int) -> list[int]:
        chain = [row]
        while len(chain) < count:
            parent = self.parent[row]
            children = [one for one in self.parent if self.parent[one] == parent]
            if parent is None or len(children) > 1 or parent in self.held:
                break
            chain.append(row := parent)
        return chain

    def verdict(self, row: int) -> Evictable:
        if self.has_children(row):
            return Evictable.INNER
        return Evictable.HELD if row in self.held else Evictable.YES

    def oldest_leaf(self, passed: set[int]) -> int | None:
        leaves = [
            (self.used_at[row], row)
            for row in self.parent
            if not self.has_children(row) and row not in self.held and row not in passed
        ]
        return min(leaves)[1] if leaves else None


class OneClassMachine(EvictionPolicyMachine):
    """Curves that know one class only are LRU, to the block."""

    def make_policy(self) -> EvictionPolicy:
        return CurvesPolicy(FakeBlocks(), features=False)


TestLruPolicy = EvictionPolicyMachine.TestCase
TestLruPolicy.settings = machine_settings(examples=60, steps=40)
TestLruPolicy.pytestmark = [pytest.mark.slow, pytest.mark.full_form]
TestOneClass = OneClassMachine.TestCase
TestOneClass.settings = machine_settings(examples=60, steps=40)
TestOneClass.pytestmark = [pytest.mark.slow, pytest.mark.full_form]
