"""What an eviction policy is: an order over blocks, and nothing else.

A policy *nominates*; the block manager evicts. It learns of blocks by their row in the index. Only
leaves (blocks without resident children) can be evicted, so a policy is told when a block becomes
one, and may forget candidates that it finds to be no leaves any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int32]
# What a block is known by when it has no row: equal for equal prefixes, 64 bits of its hash.
Keys = npt.NDArray[np.uint64]

# Kinds of turns that are told apart.
TURN_KINDS_MAX = 8


class Evictable(Enum):
    """Whether a block may be evicted now."""

    YES = auto()
    HELD = auto()  # A leaf, but pinned: ask again.
    INNER = auto()  # It has children; `on_leaf` will tell when that changes.


MayEvict = Callable[[int], Evictable]
# Of a leaf that may go, and at most so many blocks: it and those before it in its chain, each of
# which will be a leaf that may go when those after it are gone.
ChainOf = Callable[[int, int], Sequence[int]]
Victims = Iterator[Sequence[int]]


def alone(row: int, count: int) -> Sequence[int]:
    """The `ChainOf` of whoever evicts one by one."""
    return (row,)


def only_children(
    row: int, count: int, parents: Sequence[int], children: Sequence[int]
) -> list[int]:
    """The `ChainOf` of a player that holds no block: a leaf, and those before it that have no other
    child. `parents` gives a row's parent, negative where there is none."""
    chain = [row]
    while len(chain) < count:
        row = parents[row]
        if row < 0 or children[row] > 1:
            break
        chain.append(row)
    return chain


class Blocks(Protocol):
    """What a policy may ask of the blocks that it was told of."""

    count_max: int  # How many there can be at a time.
    block_tokens: int

    def keys_of(self, rows: Rows) -> Keys: ...

    def parents_of(self, rows: Rows) -> Rows:
        """-1: it is the first of its chain."""
        ...


class EvictionPolicy(Protocol):
    """Contract: tests/contract/eviction_contract.py."""

    def on_request(self, rows: Rows, absent: Keys, now: float, tenant: int = 0) -> None:
        """A request asks for a chain: first the blocks in `rows`, which count as used, then those
        of these keys, which are not here. Some or all of these are inserted soon, or none."""
        ...

    def on_insert(self, rows: Rows, now: float) -> None:
        """New blocks, in chain order."""
        ...

    def on_touch(self, rows: Rows, now: float) -> None:
        """Blocks that were used, in chain order, by nobody who has said it by `on_request`."""
        ...

    def on_leaf(self, row: int) -> None:
        """A resident block that has no resident children now: it may be nominated."""
        ...

    def on_remove(self, rows: Sequence[int]) -> None:
        """Blocks that are gone; their rows may be used again for others."""
        ...

    def on_session_end(self, rows: Rows) -> bool:
        """A user's session over this prefix has ended; whether the policy makes use of that."""
        ...

    def nominate(self, count: int, may_evict: MayEvict, chain_of: ChainOf = alone) -> Victims:
        """Up to `count` different leaves to evict, best victim first; removes nobody.

        A few at a time, because evicting one may make its parent a leaf, and that the best victim
        of all: between two steps the manager evicts and tells. A step names one leaf, or of what
        `chain_of` says of it a part from its first on, where nothing else would have come between
        them. The manager runs the iterator to its end.
        """
        ...


PolicyMaker = Callable[[Blocks], EvictionPolicy]


class EvictionOrder(Enum):
    """How a policy that learns evicts at the moment."""

    LEARNED = "learned"
    BY_AGE = "by_age"  # Its guard saw that age alone does better.
    UNGUARDED = "unguarded"  # As learned: there are too few blocks to compare.


@dataclass(frozen=True, slots=True)
class GuardReport:
    order: EvictionOrder
    # Blocks that the guard's shadow caches had when they were asked for, since the start.
    learned_hit_count: int
    by_age_hit_count: int


@runtime_checkable
class GuardedPolicy(Protocol):
    """A policy that compares itself with LRU while it works."""

    def guard_report(self) -> GuardReport: ...


@runtime_checkable
class ForecastingPolicy(Protocol):
    """A policy that can tell what will be used again."""

    def reuse_probabilities(self, rows: Rows, seconds: float) -> npt.NDArray[np.float64]:
        """Of each of these blocks within so many seconds; 1 where nothing is known yet, 0 where it
        is known that nobody will."""
        ...


@runtime_checkable
class TurnKindPolicy(Protocol):
    """A policy that learns by what engines say of turns."""

    def on_turn_kind(self, rows: Rows, absent: Keys, turn_kind: int) -> None:
        """The last request for this chain, of blocks in `rows` and of these keys that are not
        here, was a turn of this kind: 1 to TURN_KINDS_MAX."""
        ...


@runtime_checkable
class LearningPolicy(Protocol):
    """A policy that learns in the background: asked often, it says when there is work, which the
    shell does elsewhere and hands back."""

    def begin_refit(self) -> Callable[[], object] | None:
        """Work on a copy of what was seen, now that it is due; pure, of any thread."""
        ...

    def end_refit(self, result: object) -> None:
        """What that work has come to."""
        ...
