"""Tail-first LRU: which leaf goes first. What all policies promise is in tests/contract."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.policy.eviction import Evictable
from kvtier.policy.lru import LruPolicy


def rows_of(*rows: int) -> np.ndarray:
    return np.array(rows, dtype=np.int32)


class Chains:
    """A policy and the leaves it was told of."""

    def __init__(self) -> None:
        self.policy = LruPolicy()
        self.parent: dict[int, int] = {}

    def insert(self, *rows: int, now: float) -> None:
        self.policy.on_insert(rows_of(*rows), now)
        self.policy.on_leaf(rows[-1])
        self.parent.update(zip(rows[1:], rows[:-1], strict=True))

    def evict(self, count: int) -> list[int]:
        gone = []
        for (row,) in self.policy.nominate(count, lambda _: Evictable.YES):
            gone.append(row)
            self.policy.on_remove([row])
            if row in self.parent:
                self.policy.on_leaf(self.parent.pop(row))
        return gone


@pytest.fixture
def chains() -> Chains:
    return Chains()


def test_the_chain_used_longest_ago_goes_first_tail_first(chains: Chains) -> None:
    chains.insert(0, 1, 2, now=1.0)
    chains.insert(3, 4, 5, now=2.0)
    assert chains.evict(4) == [2, 1, 0, 5]


def test_a_touch_makes_a_chain_young(chains: Chains) -> None:
    chains.insert(0, 1, now=1.0)
    chains.insert(2, 3, now=2.0)
    chains.policy.on_touch(rows_of(0, 1), 3.0)
    assert chains.evict(4) == [3, 2, 1, 0]


def test_a_touch_of_the_head_leaves_the_tail_old(chains: Chains) -> None:
    chains.insert(0, 1, now=1.0)
    chains.insert(2, 3, now=2.0)
    chains.policy.on_touch(rows_of(0), 3.0)
    assert chains.evict(4) == [1, 3, 2, 0]


def test_blocks_of_an_ended_session_go_first(chains: Chains) -> None:
    chains.insert(0, 1, now=1.0)
    chains.insert(2, 3, now=2.0)
    assert chains.policy.on_session_end(rows_of(2, 3))
    assert chains.evict(3) == [3, 2, 1]


def test_a_use_after_the_session_ended_counts(chains: Chains) -> None:
    chains.insert(0, now=1.0)
    chains.insert(1, now=2.0)
    chains.policy.on_session_end(rows_of(1))
    chains.policy.on_touch(rows_of(1), 3.0)
    assert chains.evict(2) == [0, 1]


def test_equal_times_are_decided_by_the_row(chains: Chains) -> None:
    for row in (2, 0, 1):
        chains.insert(row, now=1.0)
    assert chains.evict(3) == [0, 1, 2]


def test_endless_uses_and_session_ends_take_no_more_memory(chains: Chains) -> None:
    chains.insert(0, now=1.0)
    for now in range(100):
        chains.policy.on_touch(rows_of(0), float(now))
        chains.policy.on_session_end(rows_of(0))
    assert len(chains.policy._heap) == 2


def test_a_million_rows_apart_is_no_trouble(chains: Chains) -> None:
    chains.insert(1_000_000, now=1.0)
    chains.insert(0, now=2.0)
    assert chains.evict(2) == [1_000_000, 0]
