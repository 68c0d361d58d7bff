"""What every pool promises, whatever its bytes lie in."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.pools.pool import Pool
from kvtier.pools.recovery import RecoveredEntries, recover
from kvtier.types import BlockHash, EngineId

GENERATION = 0x1122334455667788
FINGERPRINT = bytes(range(16))
EPOCH = 77
SHARD_COUNT = 2
SHARD_BYTES = 5_000  # No multiple of a page: the rest of a slot is padding.
PADDED_BYTES = 8_192
ENGINE = EngineId(b"E" * 16)


def slots_of(*slots: int) -> np.ndarray:
    return np.array(slots, np.uint32)


def hashes_of(*names: str) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(name.encode()).digest()) for name in names]


class PoolContract(ABC):
    """Tests for one namespace of two shards; `make_pool` binds slots 0 .. slot_count - 1."""

    @abstractmethod
    def make_pool(self, slot_count: int) -> Pool: ...

    @pytest.fixture
    def pool(self) -> Iterator[Pool]:
        pool = self.make_pool(8)
        yield pool
        pool.close()

    def recovered(self, pool: Pool) -> RecoveredEntries:
        return recover(pool.table_bytes(), GENERATION, {FINGERPRINT: EPOCH})

    def test_a_slot_has_one_view_of_the_payload_for_each_shard(self, pool: Pool) -> None:
        assert [view.nbytes for view in pool.views(3)] == [SHARD_BYTES] * SHARD_COUNT

    def test_no_byte_belongs_to_two_slots(self, pool: Pool) -> None:
        for slot in range(8):
            for shard, view in enumerate(pool.views(slot)):
                view[:] = slot * SHARD_COUNT + shard
        for slot in range(8):
            for shard, view in enumerate(pool.views(slot)):
                assert (view == slot * SHARD_COUNT + shard).all()

    def test_a_padded_view_is_the_payload_and_the_room_behind_it(self, pool: Pool) -> None:
        for slot in range(8):
            for shard, view in enumerate(pool.padded_views(slot)):
                assert view.nbytes == PADDED_BYTES
                view[:] = slot * SHARD_COUNT + shard
        for slot in range(8):
            padded = pool.padded_views(slot)
            for shard, view in enumerate(pool.views(slot)):
                assert (padded[shard] == slot * SHARD_COUNT + shard).all()
                view[:] = 100 + shard
                assert (padded[shard][:SHARD_BYTES] == 100 + shard).all()
                assert (padded[shard][SHARD_BYTES:] == slot * SHARD_COUNT + shard).all()

    def test_a_new_table_holds_nothing(self, pool: Pool) -> None:
        found = self.recovered(pool)
        assert len(found.ready) == len(found.reserved) == len(found.void_slots) == 0

    def test_ready_blocks_are_recovered_with_all_they_were_given(self, pool: Pool) -> None:
        first, second = hashes_of("a", "b")
        pool.write_ready(slots_of(5, 2), [first, second], [None, first], epoch=EPOCH, sequence=40)
        found = self.recovered(pool)
        assert found.ready_slots.tolist() == [2, 5]
        assert [bytes(one) for one in found.ready["hash"]] == [second, first]
        assert [bytes(one) for one in found.ready["parent"]] == [first, bytes(32)]
        assert found.ready["sequence"].tolist() == [41, 40]
        assert found.ready["payload_bytes"].tolist() == [SHARD_BYTES * SHARD_COUNT] * 2
        assert found.ready["checksum"].tolist() == [0, 0]

    def test_short_hashes_are_padded_and_their_length_kept(self, pool: Pool) -> None:
        short = BlockHash(b"s" * 16)
        pool.write_ready(slots_of(1), [short], [None], epoch=EPOCH, sequence=1)
        found = self.recovered(pool)
        assert bytes(found.ready["hash"][0]) == short + bytes(16)
        assert found.ready["hash_bytes"].tolist() == [16]

    def test_a_reserved_slot_names_its_engine_and_is_no_block(self, pool: Pool) -> None:
        pool.write_ready(slots_of(4), hashes_of("old"), [None], epoch=EPOCH, sequence=1)
        pool.write_reserved(slots_of(4), ENGINE)
        pool.write_reserved(slots_of(6), None)
        found = self.recovered(pool)
        assert len(found.ready) == 0
        assert found.reserved_slots.tolist() == [4, 6]
        assert [bytes(one) for one in found.reserved["hash"]] == [
            ENGINE.ljust(32, b"\0"),
            bytes(32),
        ]

    def test_a_gone_block_is_not_recovered(self, pool: Pool) -> None:
        pool.write_ready(slots_of(0, 1), hashes_of("a", "b"), [None] * 2, epoch=EPOCH, sequence=1)
        pool.write_gone(slots_of(0))
        assert self.recovered(pool).ready_slots.tolist() == [1]
        assert len(self.recovered(pool).void_slots) == 0

    def test_a_checksum_is_added_to_a_ready_block(self, pool: Pool) -> None:
        pool.write_ready(slots_of(0, 1), hashes_of("a", "b"), [None] * 2, epoch=EPOCH, sequence=1)
        pool.write_checksums(slots_of(1), np.array([2**64 - 1], np.uint64))
        found = self.recovered(pool)
        assert found.ready["checksum"].tolist() == [0, 2**64 - 1]
        assert [pool.stored_checksum(slot) for slot in (0, 1, 2)] == [0, 2**64 - 1, 0]
        assert pool.checksums(slots_of(1, 2, 0)).tolist() == [2**64 - 1, 0, 0]
        assert [bytes(one) for one in found.ready["hash"]] == hashes_of("a", "b")

    def test_a_checksum_that_comes_too_late_brings_nothing_back(self, pool: Pool) -> None:
        pool.write_ready(slots_of(0), hashes_of("a"), [None], epoch=EPOCH, sequence=1)
        pool.write_reserved(slots_of(1), ENGINE)
        pool.write_gone(slots_of(0))
        pool.write_checksums(slots_of(0, 1), np.array([7, 7], np.uint64))
        found = self.recovered(pool)
        assert len(found.ready) == 0
        assert found.reserved["checksum"].tolist() == [0]

    def test_a_block_of_a_cleared_epoch_is_not_recovered(self, pool: Pool) -> None:
        pool.write_ready(slots_of(0), hashes_of("a"), [None], epoch=EPOCH - 1, sequence=1)
        assert len(self.recovered(pool).ready) == 0
