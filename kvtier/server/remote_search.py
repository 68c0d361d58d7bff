"""Looking for blocks that other nodes have put into the remote engine, beside the calls that miss.

A match or an acquire that ends at a block which is not resident here asks for it and what follows,
in batches, while it goes on; what is found is told to the core, and promoted like any other block
when somebody acquires it. Nobody waits for that but an acquire that waits for lower tiers anyway.
What is not there is remembered for a time, so that a stream of new prompts asks once for each.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from kvtier.clock import Clock
from kvtier.core.events import BlocksFound
from kvtier.server.base import Base
from kvtier.server.remote_tier import RemoteKeeper
from kvtier.types import BlockHash, NamespaceId, PackedHashes, TierName

# How long a block that was not there is not asked for again.
ABSENT_SECONDS = 10.0
ABSENT_MAX = 65_536
# Asked for at once, and at most for one call.
BATCH_BLOCKS = 128
CHAIN_BLOCKS_MAX = 16_384
SEARCHES_MAX = 64

_Key = tuple[NamespaceId, BlockHash]


class AbsentBlocks:
    """Blocks that were not there a moment ago; pure."""

    def __init__(self, clock: Clock, *, seconds: float, count_max: int) -> None:
        self._clock = clock
        self._seconds = seconds
        self._count_max = count_max
        self._until: OrderedDict[_Key, float] = OrderedDict()  # Ascending.

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: _Key) -> None:
        now = self._clock.now()
        self._until.pop(key, None)
        while self._until:
            first = next(iter(self._until))
            if len(self._until) < self._count_max and now < self._until[first]:
                break
            self._until.popitem(last=False)
        self._until[key] = now + self._seconds

    def __contains__(self, key: _Key) -> bool:
        until = self._until.get(key)
        return until is not None and self._clock.now() < until


class RemoteSearch:
    """Lives on the event loop."""

    def __init__(self, base: Base, keeper: RemoteKeeper) -> None:
        self._core = base.core
        self._clock = base.clock
        self._metrics = base.metrics
        self._keeper = keeper
        self._absent = AbsentBlocks(base.clock, seconds=ABSENT_SECONDS, count_max=ABSENT_MAX)
        self._tasks: asyncio.TaskGroup | None = None
        self._under_way: dict[_Key, asyncio.Task[None]] = {}

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def stop(self) -> None:
        for task in self._under_way.values():
            task.cancel()

    def begin(
        self, namespace: NamespaceId, hashes: PackedHashes, matched_count: int
    ) -> asyncio.Task[None] | None:
        """Look for what follows the first `matched_count` blocks, unless somebody does or has just
        done so in vain. On the match's path: some microseconds."""
        if matched_count >= len(hashes) or self._tasks is None:
            return None
        key = (namespace, hashes[matched_count])
        if key in self._absent:
            return None
        task = self._under_way.get(key)
        if task is None and len(self._under_way) < SEARCHES_MAX:
            task = self._tasks.create_task(self._look(namespace, hashes, matched_count))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return task

    async def wait(
        self, namespace: NamespaceId, hashes: PackedHashes, matched_count: int, until: float
    ) -> None:
        """Until what follows is known to the core, or the time is over."""
        task = self.begin(namespace, hashes, matched_count)
        if task is not None:
            await asyncio.wait([task], timeout=max(0.0, until - self._clock.now()))

    async def _look(self, namespace: NamespaceId, hashes: PackedHashes, start: int) -> None:
        at, stop = start, min(len(hashes), start + CHAIN_BLOCKS_MAX)
        while at < stop:
            epoch = self._core.namespace_epoch(namespace)
            part = hashes[at : min(at + BATCH_BLOCKS, stop)]
            count = await self._keeper.exists_count(namespace, part)
            if count is None:
                return  # Nobody knows: the next call asks again, as far as the breaker lets it.
            if count:
                parent = hashes[at - 1] if at else None
                self._metrics.remote.found_blocks.inc(count)
                self._core.post(
                    BlocksFound(namespace, epoch, part[:count], parent, TierName.REMOTE)
                )
            if count < len(part):
                self._absent.add((namespace, part[count]))
                return
            at += count
