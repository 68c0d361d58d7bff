"""Replays a trace on an eviction policy alone: no daemon, no bytes, one tier of so many blocks.

A hit is a block of a request's longest resident prefix. The whole chain of each request is resident
after it, for as long as the policy keeps it; evicted are leaves only, as the manager does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.policy.eviction import (
    Evictable,
    EvictionPolicy,
    Keys,
    LearningPolicy,
    PolicyMaker,
    Rows,
    only_children,
)
from kvtier.sim.traces import Blocks, Trace

# Requests of one moment come one after the other all the same.
APART_SECONDS = 1e-6


@dataclass(frozen=True, slots=True)
class ReplayResult:
    asked_count: int
    hit_count: int

    @property
    def hit_ratio(self) -> float:
        return self.hit_count / self.asked_count if self.asked_count else 0.0


def leading_count(resident: npt.NDArray[np.bool_], blocks: Blocks) -> int:
    """How many blocks of the chain are resident before the first that is not."""
    if not len(blocks):
        return 0
    absent = ~resident[blocks]
    first = int(absent.argmax())
    return first if absent[first] else len(blocks)


class TracedBlocks:
    """What a policy may ask: it knows blocks by their number in the trace."""

    def __init__(self, trace: Trace, capacity_blocks: int) -> None:
        self._parent = trace.parent
        self.count_max, self.block_tokens = capacity_blocks, trace.block_tokens

    def keys_of(self, rows: Rows) -> Keys:
        return rows.astype(np.uint64)

    def parents_of(self, rows: Rows) -> Rows:
        return self._parent[rows]


def replay_policy(
    trace: Trace,
    make_policy: PolicyMaker,
    capacity_blocks: int,
    on_request: Callable[[float, int], None] = lambda at, hit_count: None,
) -> ReplayResult:
    """`on_request` is told, after each, when it came and how many hits there have been."""
    policy = make_policy(TracedBlocks(trace, capacity_blocks))
    tier = _Tier(trace, policy, capacity_blocks)
    learning = policy if isinstance(policy, LearningPolicy) else None
    now = -np.inf
    for request in trace.requests:
        now = max(request.at, now + APART_SECONDS)
        tier.use(request.blocks, now, request.tenant)
        if learning is not None:
            work = learning.begin_refit()
            if work is not None:
                learning.end_refit(work())
        on_request(now, tier.hit_count)
    return ReplayResult(trace.access_count, tier.hit_count)


class _Tier:
    def __init__(self, trace: Trace, policy: EvictionPolicy, capacity_blocks: int) -> None:
        self._parent = trace.parent.tolist()
        self._resident = np.zeros(trace.unique_count, dtype=np.bool_)
        self._children = [0] * trace.unique_count  # Those that are resident.
        self._policy, self._capacity = policy, capacity_blocks
        self._count = self.hit_count = 0

    def use(self, blocks: Blocks, now: float, tenant: int) -> None:
        count = leading_count(self._resident, blocks)
        self.hit_count += count
        fresh = blocks[count:]
        self._policy.on_request(blocks[:count], fresh.astype(np.uint64), now, tenant)
        if len(fresh):
            self._insert(fresh, now)
        excess = self._count - self._capacity
        if excess > 0:
            for chain in self._policy.nominate(excess, self._may_evict, self._chain_of):
                self._evict(list(chain))

    def _insert(self, fresh: Blocks, now: float) -> None:
        self._resident[fresh] = True
        self._count += len(fresh)
        for block in fresh.tolist():
            parent = self._parent[block]
            if parent >= 0:
                self._children[parent] += 1
        self._policy.on_insert(fresh, now)
        self._policy.on_leaf(int(fresh[-1]))

    def _may_evict(self, block: int) -> Evictable:
        return Evictable.INNER if self._children[block] else Evictable.YES

    def _chain_of(self, block: int, count: int) -> list[int]:
        return only_children(block, count, self._parent, self._children)

    def _evict(self, chain: list[int]) -> None:
        self._resident[chain] = False
        self._count -= len(chain)
        self._policy.on_remove(chain)
        for block in chain[1:]:
            self._children[block] = 0
        parent = self._parent[chain[-1]]
        if parent >= 0:
            self._children[parent] -= 1
            if not self._children[parent]:
                self._policy.on_leaf(parent)
