"""Checksums: of the shards' checksums, in their order, over every byte."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kvtier import checksum
from kvtier.io.checksum import block_checksum, block_checksums


def shards_of(seed: int, count: int, length: int = 4_999) -> list[np.ndarray]:
    chance = np.random.default_rng(seed)
    return [chance.integers(0, 256, length, np.uint8) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_block_sums_its_shards_sums(count: int) -> None:
    shards = shards_of(1, count)
    sums = b"".join(xxhash.xxh3_64(bytes(one)).intdigest().to_bytes(8, "little") for one in shards)
    assert block_checksum(shards) == xxhash.xxh3_64(sums).intdigest()


def test_views_in_slots_and_bytes_by_value_have_the_same_checksum() -> None:
    shards = shards_of(2, 3)
    by_value = b"".join(bytes(shard) for shard in shards)
    assert checksum.block_checksum(by_value, len(shards[0])) == block_checksum(shards)


@pytest.mark.parametrize("place", [0, 2_500, 4_998])
def test_one_flipped_bit_is_seen(place: int) -> None:
    shards = shards_of(3, 2)
    before = block_checksum(shards)
    shards[1][place] ^= 1
    assert block_checksum(shards) != before


def test_swapped_shards_are_another_block() -> None:
    shards = shards_of(4, 2)
    assert block_checksum(shards) != block_checksum(shards[::-1])


def test_a_batch_is_its_blocks() -> None:
    blocks = [shards_of(seed, 2) for seed in range(5)]
    assert block_checksums(blocks).tolist() == [block_checksum(block) for block in blocks]
    assert block_checksums([]).dtype == np.uint64
