"""Replays a trace on memory above a tier that wears, policies alone: what each tier gives, and what
is written.

Memory evicts by its policy, leaves first; what it evicts may go down, by the rule that is tried.
The tier below evicts what was used there longest ago, leaves first among what lies there. A hit
below is promoted: its copy stays (*keep copy*) or goes (*exclusive*). A hit is a block of the
longest prefix that is resident in either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from kvtier.policy.eviction import (
    Evictable,
    EvictionPolicy,
    ForecastingPolicy,
    LearningPolicy,
    PolicyMaker,
)
from kvtier.policy.lru import LruPolicy
from kvtier.sim.replay import APART_SECONDS, TracedBlocks, leading_count
from kvtier.sim.traces import Blocks, Trace


class Rule(Enum):
    EXCLUSIVE = auto()
    KEEP_COPY = auto()
    FORECAST = auto()  # Keep copy, and write what is likely enough to be used again.


@dataclass(frozen=True, slots=True)
class TwoTierResult:
    asked_count: int
    upper_hit_count: int
    lower_hit_count: int
    written_count: int


def replay_two_tiers(
    trace: Trace,
    make_policy: PolicyMaker,
    capacities: tuple[int, int],
    rule: Rule,
    *,
    least: float = 0.0,
) -> TwoTierResult:
    """`capacities`: blocks above and below. `least`: with FORECAST, how likely a block must be used
    again while it would lie below; what was used twice goes down anyway."""
    replay = _TwoTiers(trace, make_policy, capacities, rule, least)
    policy = replay.policy
    learning = policy if isinstance(policy, LearningPolicy) else None
    now = -np.inf
    for request in trace.requests:
        now = max(request.at, now + APART_SECONDS)
        replay.use(request.blocks, now, request.tenant)
        work = None if learning is None else learning.begin_refit()
        if learning is not None and work is not None:
            learning.end_refit(work())
    found = replay.upper_hit_count, replay.lower_hit_count, replay.written_count
    return TwoTierResult(trace.access_count, *found)


class _Store:
    """What is in one tier. Invariant: `children` counts those of a block that are in it too."""

    def __init__(
        self, trace: Trace, policy: EvictionPolicy, capacity: int, leaving: Callable[[int], None]
    ) -> None:
        self.resident = np.zeros(trace.unique_count, dtype=np.bool_)
        self._parent = trace.parent.tolist()
        self._children = [0] * trace.unique_count
        self._policy, self._capacity, self._leaving = policy, capacity, leaving
        self._count = 0

    def insert(self, blocks: Blocks, now: float) -> None:
        """New ones, in chain order."""
        if not len(blocks):
            return
        self.resident[blocks] = True
        self._count += len(blocks)
        for block in blocks.tolist():
            parent = self._parent[block]
            if parent >= 0:
                self._children[parent] += 1
        self._policy.on_insert(blocks, now)
        for block in blocks.tolist():
            if not self._children[block]:
                self._policy.on_leaf(block)

    def shrink(self) -> None:
        excess = self._count - self._capacity
        if excess > 0:
            for (block,) in self._policy.nominate(excess, self._may_evict):
                self.remove(block)
                self._leaving(block)

    def remove(self, block: int) -> None:
        self.resident[block] = False
        self._count -= 1
        self._policy.on_remove([block])
        parent = self._parent[block]
        if parent >= 0:
            self._children[parent] -= 1
            if not self._children[parent] and self.resident[parent]:
                self._policy.on_leaf(parent)

    def _may_evict(self, block: int) -> Evictable:
        inner = self._children[block] or not self.resident[block]
        return Evictable.INNER if inner else Evictable.YES


class _TwoTiers:
    def __init__(
        self,
        trace: Trace,
        make_policy: PolicyMaker,
        capacities: tuple[int, int],
        rule: Rule,
        least: float,
    ) -> None:
        self.policy = make_policy(TracedBlocks(trace, capacities[0]))
        self._rule, self._least, self._lower_capacity = rule, least, capacities[1]
        self._lower_policy = LruPolicy()
        self._evicted: list[int] = []
        self._upper = _Store(trace, self.policy, capacities[0], self._evicted.append)
        self._lower = _Store(trace, self._lower_policy, capacities[1], lambda _: None)
        self._uses = np.zeros(trace.unique_count, np.int32)
        self._used_at = np.zeros(trace.unique_count)
        self._began_at: float | None = None
        self.upper_hit_count = self.lower_hit_count = self.written_count = 0

    def use(self, blocks: Blocks, now: float, tenant: int) -> None:
        upper, lower = self._upper, self._lower
        self._began_at = now if self._began_at is None else self._began_at
        count = leading_count(upper.resident | lower.resident, blocks)
        above = int(upper.resident[blocks[:count]].sum())
        self.upper_hit_count += above
        self.lower_hit_count += count - above
        below = blocks[lower.resident[blocks]]
        if self._rule is Rule.EXCLUSIVE:
            for block in below.tolist():
                lower.remove(block)
        else:
            self._lower_policy.on_touch(below, now)
        is_here = upper.resident[blocks]
        here, absent = blocks[is_here], blocks[~is_here]
        self._uses[blocks] += 1
        self._used_at[blocks] = now
        self.policy.on_request(here, absent.astype(np.uint64), now, tenant)
        upper.insert(absent, now)
        upper.shrink()
        if self._evicted:
            # Tails went first: heads first again.
            self._write(np.array(self._evicted[::-1], np.int32), now)
            self._evicted.clear()
            lower.shrink()

    def _write(self, blocks: Blocks, now: float) -> None:
        blocks = blocks[~self._lower.resident[blocks]]
        if self._rule is Rule.FORECAST and isinstance(self.policy, ForecastingPolicy):
            likely = self.policy.reuse_probabilities(blocks, self._stay_seconds(now))
            blocks = blocks[(likely >= self._least) | (self._uses[blocks] >= 2)]
        self.written_count += len(blocks)
        # Below they are as old as they were above.
        times = self._used_at[blocks]
        for part in np.split(blocks, np.flatnonzero(np.diff(times)) + 1):
            if len(part):
                self._lower.insert(part, float(self._used_at[part[0]]))

    def _stay_seconds(self, now: float) -> float:
        """How long a block lies below, at the rate of writing so far."""
        assert self._began_at is not None
        written = max(1, self.written_count)
        return self._lower_capacity * max(1.0, now - self._began_at) / written
