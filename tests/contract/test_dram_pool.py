"""The DRAM pool keeps the contract of pools, over real memfds; and what only it promises."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.clock import SystemClock
from kvtier.memory import Mapping
from kvtier.pools.dram import DramPool
from kvtier.pools.pool import Pool, SlabBinding
from kvtier.pools.slabs import PageKind, populate_slab, punch_slab
from kvtier.types import SlabId, SlabSetId
from tests.contract.pool_contract import (
    EPOCH,
    FINGERPRINT,
    GENERATION,
    SHARD_BYTES,
    SHARD_COUNT,
    PoolContract,
    hashes_of,
    slots_of,
)

SLAB_BYTES = 2 << 20
SLOT_BYTES = 8_192


def bind_set(
    pool: DramPool,
    number: int,
    *,
    slot_first: int,
    slot_count: int,
    slot_bytes: int = SLOT_BYTES,
) -> None:
    ids = [SlabId(10 * number + shard) for shard in range(SHARD_COUNT)]
    for slab_id in ids:
        pool.add_slab(populate_slab(slab_id, SLAB_BYTES, PageKind.BASE, clock=SystemClock()))
    pool.bind(
        SlabBinding(
            slab_set=SlabSetId(number),
            slabs=tuple(ids),
            fingerprint=FINGERPRINT,
            slot_first=slot_first,
            slot_count=slot_count,
            slot_bytes=slot_bytes,
            shard_bytes=SHARD_BYTES,
        )
    )


class TestDramPool(PoolContract):
    def make_pool(self, slot_count: int) -> Pool:
        """Two slab sets, so that slots of one call lie in both."""
        pool = DramPool(GENERATION)
        bind_set(pool, 1, slot_first=0, slot_count=4)
        bind_set(pool, 2, slot_first=4, slot_count=slot_count - 4)
        return pool


@pytest.fixture
def pool() -> Iterator[DramPool]:
    pool = DramPool(GENERATION)
    bind_set(pool, 1, slot_first=0, slot_count=4)
    bind_set(pool, 2, slot_first=4, slot_count=4)
    yield pool
    assert pool.check_invariants() == []
    pool.close()


def test_a_worker_that_maps_the_fd_sees_the_slot_where_the_binding_says(pool: DramPool) -> None:
    mapping = Mapping(os.dup(pool.slab_fd(SlabId(21))), SLAB_BYTES)
    pool.views(6)[1][:] = 9
    first = (6 - 4) * SLOT_BYTES
    assert (mapping.array[first : first + SHARD_BYTES] == 9).all()
    assert not mapping.array[:first].any()


def test_a_dropped_set_leaves_its_neighbour_and_no_entries(pool: DramPool) -> None:
    pool.write_ready(slots_of(1, 5), hashes_of("a", "b"), [None] * 2, epoch=EPOCH, sequence=1)
    pool.views(5)[0][:] = 5
    for slab in pool.drop(SlabSetId(1)):
        assert punch_slab(slab), "nobody held a view"
    table = pool.table_bytes().reshape(-1, 128)
    assert not table[:4].any()
    assert table[5].any()
    assert (pool.views(5)[0] == 5).all()
    with pytest.raises(AssertionError, match="slot 1 is in no slab"):
        pool.views(1)


def test_slot_numbers_of_a_dropped_set_are_never_given_again(pool: DramPool) -> None:
    for slab in pool.drop(SlabSetId(2)):
        punch_slab(slab)
    with pytest.raises(AssertionError, match="slot numbers are given once"):
        bind_set(pool, 3, slot_first=4, slot_count=4)
    bind_set(pool, 4, slot_first=8, slot_count=4)
    assert len(pool.views(8)) == SHARD_COUNT


def test_padding_never_reaches_into_the_next_slot(pool: DramPool) -> None:
    bind_set(pool, 3, slot_first=8, slot_count=4, slot_bytes=SHARD_BYTES + 1_000)
    assert len(pool.views(9)) == SHARD_COUNT
    with pytest.raises(AssertionError, match="the padding would reach into the next slot"):
        pool.padded_views(9)


def test_padded_views_begin_where_a_disk_can_read_into(pool: DramPool) -> None:
    for slot in range(8):
        assert not any(view.ctypes.data % 4096 for view in pool.padded_views(slot))


def test_a_slab_is_bound_once(pool: DramPool) -> None:
    bound = pool.binding(0)
    again = SlabBinding(SlabSetId(3), bound.slabs, FINGERPRINT, 8, 4, SLOT_BYTES, SHARD_BYTES)
    with pytest.raises(AssertionError, match="bound twice"):
        pool.bind(again)


def test_punching_takes_the_bytes_from_a_worker_that_still_maps_the_slab(pool: DramPool) -> None:
    fd = os.dup(pool.slab_fd(SlabId(10)))
    worker = Mapping(fd, SLAB_BYTES)
    pool.views(0)[0][:] = 1
    assert os.fstat(fd).st_blocks * 512 == SLAB_BYTES
    for slab in pool.drop(SlabSetId(1)):
        punch_slab(slab)
    assert os.fstat(fd).st_blocks == 0
    assert not np.any(worker.array)
    os.close(fd)
