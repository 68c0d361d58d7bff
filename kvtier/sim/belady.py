"""The best that any policy could have done: evict what is used again last.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966. On prefix
trees a block's next use is never later than its children's, so with the deeper one first on ties a
parent is never evicted before its child, and the rule is exact.
"""

from __future__ import annotations

import heapq

import numpy as np

from kvtier.sim.replay import ReplayResult, leading_count
from kvtier.sim.traces import Trace


def replay_belady(trace: Trace, capacity_blocks: int) -> ReplayResult:
    next_uses = _next_uses(trace)
    resident = np.zeros(trace.unique_count, dtype=np.bool_)
    newest = np.zeros(trace.unique_count, dtype=np.int64)  # By block: its last entry in the heap.
    heap: list[tuple[int, int, int, int]] = []  # (-next use, -depth, block, number of the entry)
    resident_count = hit_count = entry = 0
    for request, uses in zip(trace.requests, next_uses, strict=True):
        hit_count += leading_count(resident, request.blocks)
        resident_count += int(np.count_nonzero(~resident[request.blocks]))
        resident[request.blocks] = True
        for depth, (block, use) in enumerate(zip(request.blocks.tolist(), uses, strict=True)):
            entry += 1
            newest[block] = entry
            heapq.heappush(heap, (-use, -depth, block, entry))
        while resident_count > capacity_blocks:
            _, _, block, number = heapq.heappop(heap)
            if newest[block] == number:
                resident[block] = False
                resident_count -= 1
    return ReplayResult(trace.access_count, hit_count)


def _next_uses(trace: Trace) -> list[list[int]]:
    """By request and block: the number of the request that uses it next; beyond all for never."""
    never = len(trace.requests)
    next_use = np.full(trace.unique_count, never, dtype=np.int64)
    found: list[list[int]] = []
    for number in range(never - 1, -1, -1):
        blocks = trace.requests[number].blocks
        found.append(next_use[blocks].tolist())
        next_use[blocks] = number
    return found[::-1]
