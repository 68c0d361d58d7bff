"""The mover's checksums: of large blocks few at a time, so that the first go on meanwhile."""

from __future__ import annotations

import asyncio
from typing import cast

import numpy as np
import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.io.checksum import block_checksum
from kvtier.memory import Bytes
from kvtier.metrics import Metrics
from kvtier.pools.pool import Pool
from kvtier.server.core_loop import CoreLoop
from kvtier.server.mover import CHECKSUM_BATCH_BYTES, CHECKSUM_BATCH_SLOTS, Mover
from kvtier.types import NamespaceId
from tests.support.clock import ManualClock
from tests.support.recording_core import RecordingManager

NAMESPACE = NamespaceId(1)


class OneBlockPool:
    """Every slot holds the same two shards."""

    def __init__(self, shard_bytes: int) -> None:
        self.shards = [np.full(shard_bytes, shard, np.uint8) for shard in (1, 2)]

    def views(self, slot: int) -> list[Bytes]:
        return list(self.shards)


@pytest.mark.parametrize(
    ("shard_bytes", "batch_count"),
    [(64, CHECKSUM_BATCH_SLOTS), (1 << 20, 4), (CHECKSUM_BATCH_BYTES, 1)],
)
def test_checksums_come_in_batches_bounded_in_slots_and_bytes(
    shard_bytes: int, batch_count: int
) -> None:
    pool, manager = OneBlockPool(shard_bytes), RecordingManager()
    slots = np.arange(2 * batch_count + 1, dtype=np.uint32)

    async def main() -> None:
        core = CoreLoop(manager, clock=ManualClock(), metrics=Metrics())
        mover = Mover(cast("Pool", pool), core, Metrics())
        async with asyncio.TaskGroup() as tasks:
            mover.start(tasks)
            mover.on_compute_checksums(ins.ComputeChecksums(NAMESPACE, slots))
        assert mover.waiting_count == 0
        mover.stop()

    asyncio.run(main())
    told = manager.of(ev.ChecksumsComputed)
    assert [len(one.slots) for one in told] == [batch_count, batch_count, 1]
    assert np.concatenate([one.slots for one in told]).tolist() == slots.tolist()
    assert {int(one) for event in told for one in event.checksums} == {block_checksum(pool.shards)}
