"""The in-memory pool keeps the contract: it is the measure for the others."""

from __future__ import annotations

from kvtier.pools.pool import Pool
from tests.contract.pool_contract import (
    FINGERPRINT,
    GENERATION,
    SHARD_BYTES,
    SHARD_COUNT,
    PoolContract,
)
from tests.support.memory_pool import MemoryPool


class TestMemoryPool(PoolContract):
    def make_pool(self, slot_count: int) -> Pool:
        return MemoryPool(
            slot_count=slot_count,
            shard_count=SHARD_COUNT,
            shard_bytes=SHARD_BYTES,
            fingerprint=FINGERPRINT,
            generation=GENERATION,
        )
