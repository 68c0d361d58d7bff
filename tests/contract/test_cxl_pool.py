"""A pool keeps its contract whatever memory a CXL tier gives it; slabs are all it sees of that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.io.nodes import read_nodes
from kvtier.io.throttle import EmulatedSpeed
from kvtier.pools.cxl import CxlMemory, DaxMemory, EmulatedMemory, NodeMemory
from kvtier.pools.dram import DramPool
from kvtier.pools.pool import Pool, SlabBinding
from kvtier.types import SlabId, SlabSetId
from tests.contract.pool_contract import (
    FINGERPRINT,
    GENERATION,
    SHARD_BYTES,
    SHARD_COUNT,
    PoolContract,
)
from tests.support.dax_files import dax_file

MIB = 1 << 20
SLAB_BYTES = 2 * MIB
SLOT_BYTES = 8_192
SET_COUNT = 2


def pool_in(memory: CxlMemory, slot_count: int) -> DramPool:
    """Two slab sets, so that slots of one call lie in both."""
    pool = DramPool(GENERATION)
    for number in range(SET_COUNT):
        ids = tuple(SlabId(10 * number + shard) for shard in range(SHARD_COUNT))
        for slab_id in ids:
            pool.add_slab(
                memory.source.populate(
                    slab_id, SLAB_BYTES, clock=SystemClock(), is_cancelled=lambda: False
                )
            )
        count = slot_count // SET_COUNT
        pool.bind(
            SlabBinding(
                slab_set=SlabSetId(number),
                slabs=ids,
                fingerprint=FINGERPRINT,
                slot_first=number * count,
                slot_count=count,
                slot_bytes=SLOT_BYTES,
                shard_bytes=SHARD_BYTES,
            )
        )
    return pool


class TestPoolOnADaxDevice(PoolContract):
    @pytest.fixture(autouse=True)
    def memory(self, tmp_path: Path) -> Iterator[None]:
        device = dax_file(tmp_path / "dax0.0", SLAB_BYTES * (1 + SET_COUNT * SHARD_COUNT))
        self._memory = DaxMemory(device, slab_bytes=SLAB_BYTES, generation=GENERATION)
        yield
        self._memory.close()
        # Whatever the pool held of the device is gone with it.
        DaxMemory(device, slab_bytes=SLAB_BYTES, generation=GENERATION + 1).close()

    def make_pool(self, slot_count: int) -> Pool:
        return pool_in(self._memory, slot_count)


class TestPoolOnANode(PoolContract):
    def make_pool(self, slot_count: int) -> Pool:
        node = next((one.index for one in read_nodes() if one.memory_bytes), None)
        if node is None:
            pytest.skip("the kernel tells nothing of NUMA nodes")
        memory = NodeMemory(node, slab_bytes=SLAB_BYTES, budget_bytes=4 * SLAB_BYTES)
        try:
            return pool_in(memory, slot_count)
        except PermissionError:
            pytest.skip("mbind is forbidden here (a container's seccomp profile)")


class TestPoolInEmulatedMemory(PoolContract):
    def make_pool(self, slot_count: int) -> Pool:
        memory = EmulatedMemory(
            EmulatedSpeed(4e9),
            SystemClock(),
            slab_bytes=SLAB_BYTES,
            budget_bytes=4 * SLAB_BYTES,
        )
        return pool_in(memory, slot_count)
