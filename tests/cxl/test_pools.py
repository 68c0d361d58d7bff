"""The contract of pools, on the real thing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.io.dax import find_dax_device
from kvtier.pools.cxl import DaxMemory, NodeMemory
from kvtier.pools.dax import format_device
from kvtier.pools.pool import Pool
from tests.contract.pool_contract import GENERATION, PoolContract
from tests.contract.test_cxl_pool import SLAB_BYTES, pool_in

pytestmark = pytest.mark.cxl


class TestPoolOnANodeWithoutProcessors(PoolContract):
    @pytest.fixture(autouse=True)
    def memory(self, node: int) -> None:
        self._memory = NodeMemory(node, slab_bytes=SLAB_BYTES)

    def make_pool(self, slot_count: int) -> Pool:
        pool = pool_in(self._memory, slot_count)
        assert pool.check_placement() == []
        return pool


class TestPoolOnADevice(PoolContract):
    @pytest.fixture(autouse=True)
    def memory(self, device_path: Path) -> Iterator[None]:
        device = find_dax_device(device_path)
        format_device(device, generation=1, force=True)
        self._memory = DaxMemory(device, slab_bytes=SLAB_BYTES, generation=GENERATION)
        yield
        self._memory.close()
        DaxMemory(device, slab_bytes=SLAB_BYTES, generation=GENERATION + 1).close()

    def make_pool(self, slot_count: int) -> Pool:
        return pool_in(self._memory, slot_count)
