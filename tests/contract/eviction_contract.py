"""What every eviction policy promises, whatever its order is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
import pytest

from kvtier.policy.eviction import (
    TURN_KINDS_MAX,
    ChainOf,
    Evictable,
    EvictionPolicy,
    TurnKindPolicy,
    alone,
)


def rows_of(*rows: int) -> np.ndarray:
    return np.array(rows, dtype=np.int32)


class EvictionPolicyContract(ABC):
    """`chain` inserts blocks that follow one another, as the block manager does."""

    @abstractmethod
    def make_policy(self) -> EvictionPolicy: ...

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return self.make_policy()

    def chain(self, policy: EvictionPolicy, *rows: int, now: float) -> None:
        policy.on_insert(rows_of(*rows), now)
        policy.on_leaf(rows[-1])

    def nominated(
        self,
        policy: EvictionPolicy,
        count: int,
        *,
        held: Iterable[int] = (),
        inner: Iterable[int] = (),
    ) -> list[int]:
        def verdict(row: int) -> Evictable:
            if row in inner:
                return Evictable.INNER
            return Evictable.HELD if row in held else Evictable.YES

        return [row for (row,) in policy.nominate(count, verdict)]

    def evicted(self, policy: EvictionPolicy, count: int, *, held: Iterable[int] = ()) -> list[int]:
        """Of one chain 0, 1, …: what goes, as the block manager has it go."""
        gone: list[int] = []

        def verdict(row: int) -> Evictable:
            return Evictable.HELD if row in held else Evictable.YES

        for (row,) in policy.nominate(count, verdict):
            gone.append(row)
            policy.on_remove([row])
            if row:
                policy.on_leaf(row - 1)
        return gone

    def test_nothing_is_nominated_of_nothing(self, policy: EvictionPolicy) -> None:
        assert self.nominated(policy, 5) == []

    def test_only_leaves_are_nominated(self, policy: EvictionPolicy) -> None:
        self.chain(policy, 0, 1, 2, now=1.0)
        assert self.nominated(policy, 5) == [2]

    def test_no_more_than_asked_for_and_none_twice(self, policy: EvictionPolicy) -> None:
        for row in range(8):
            self.chain(policy, row, now=float(row))
        assert len(set(self.nominated(policy, 3))) == 3
        assert sorted(self.nominated(policy, 99)) == list(range(8))

    def test_nominating_removes_nobody(self, policy: EvictionPolicy) -> None:
        self.chain(policy, 0, now=1.0)
        assert self.nominated(policy, 1) == self.nominated(policy, 1) == [0]

    def test_a_held_leaf_is_passed_over_and_remembered(self, policy: EvictionPolicy) -> None:
        self.chain(policy, 0, now=1.0)
        self.chain(policy, 1, now=2.0)
        assert self.nominated(policy, 5, held=[0]) == [1]
        assert sorted(self.nominated(policy, 5)) == [0, 1]

    def test_a_held_leaf_that_came_up_while_its_chain_went_is_remembered(
        self, policy: EvictionPolicy
    ) -> None:
        self.chain(policy, 0, 1, 2, 3, now=1.0)
        assert self.evicted(policy, 5, held=[1]) == [3, 2]
        assert self.evicted(policy, 5) == [1, 0]

    def test_with_its_leaf_goes_of_a_chain_what_would_have_gone_next(self) -> None:
        def victims(chain_of: ChainOf) -> list[int]:
            policy = self.make_policy()
            self.chain(policy, 0, 1, 2, 3, now=1.0)
            self.chain(policy, 4, 5, now=2.0)
            policy.on_touch(rows_of(0, 1), 3.0)
            gone: list[int] = []
            for rows in policy.nominate(6, lambda _: Evictable.YES, chain_of):
                gone.extend(rows)
                policy.on_remove(rows)
                if rows[-1] not in (0, 4):
                    policy.on_leaf(rows[-1] - 1)
            return gone

        whole = {3: [3, 2, 1, 0], 5: [5, 4], 1: [1, 0]}
        assert victims(lambda row, count: whole.get(row, [row])[:count]) == victims(alone)

    def test_an_inner_block_comes_back_when_it_is_a_leaf_again(
        self, policy: EvictionPolicy
    ) -> None:
        self.chain(policy, 0, now=1.0)
        assert self.nominated(policy, 5, inner=[0]) == []
        policy.on_leaf(0)
        assert self.nominated(policy, 5) == [0]

    def test_a_removed_block_is_not_nominated(self, policy: EvictionPolicy) -> None:
        self.chain(policy, 0, now=1.0)
        self.chain(policy, 1, now=1.0)
        policy.on_remove([0])
        assert self.nominated(policy, 5) == [1]

    def test_a_row_used_again_is_a_new_block(self, policy: EvictionPolicy) -> None:
        self.chain(policy, 0, now=1.0)
        policy.on_remove([0])
        self.chain(policy, 0, 1, now=2.0)
        assert self.nominated(policy, 5, inner=[0]) == [1]
        assert self.nominated(policy, 5, inner=[0]) == [1]

    def test_a_parent_made_a_leaf_in_between_is_nominated_in_the_same_round(
        self, policy: EvictionPolicy
    ) -> None:
        self.chain(policy, 0, 1, 2, now=1.0)
        gone: list[int] = []
        for (row,) in policy.nominate(3, lambda _: Evictable.YES):
            gone.append(row)
            policy.on_remove([row])
            if row:
                policy.on_leaf(row - 1)
        assert gone == [2, 1, 0]
        assert self.nominated(policy, 5) == []

    def test_a_block_that_came_back_goes_with_its_parents_in_one_round(
        self, policy: EvictionPolicy
    ) -> None:
        self.chain(policy, 0, 1, 2, now=1.0)
        policy.on_remove([2])
        policy.on_leaf(1)
        self.chain(policy, 2, now=2.0)
        gone: list[int] = []

        def verdict(row: int) -> Evictable:
            return Evictable.YES if row == 2 - len(gone) else Evictable.INNER

        for (row,) in policy.nominate(3, verdict):
            gone.append(row)
            policy.on_remove([row])
            if row:
                policy.on_leaf(row - 1)
        assert gone == [2, 1, 0]

    def test_a_session_end_harms_no_rule(self, policy: EvictionPolicy) -> None:
        self.chain(policy, 0, 1, now=1.0)
        self.chain(policy, 2, now=2.0)
        assert isinstance(policy.on_session_end(rows_of(0, 1)), bool)
        assert sorted(self.nominated(policy, 5)) == [1, 2]

    def test_kinds_of_turns_harm_no_rule(self, policy: EvictionPolicy) -> None:
        if not isinstance(policy, TurnKindPolicy):
            return
        self.chain(policy, 0, 1, now=1.0)
        self.chain(policy, 2, now=2.0)
        absent = np.array([7, 8], np.uint64)
        for turn_kind in (1, TURN_KINDS_MAX, 1):
            policy.on_turn_kind(rows_of(0, 1), absent, turn_kind)
        policy.on_turn_kind(rows_of(), absent[:0], 1)
        assert sorted(self.nominated(policy, 5)) == [1, 2]

    def test_empty_lists_are_no_news(self, policy: EvictionPolicy) -> None:
        policy.on_insert(rows_of(), 1.0)
        policy.on_touch(rows_of(), 1.0)
        policy.on_session_end(rows_of())
        policy.on_remove([])
        assert self.nominated(policy, 1) == []
