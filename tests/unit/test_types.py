"""Packed hashes are cut as a list of hashes would be."""

from __future__ import annotations

from itertools import product

import pytest

from kvtier.types import BlockHash, PackedHashes

SIZES = (16, 20, 32)


def hashes_of(size: int, count: int) -> list[BlockHash]:
    return [BlockHash(bytes([number]) * size) for number in range(count)]


@pytest.mark.parametrize("size", SIZES)
def test_every_slice_is_that_of_a_list(size: int) -> None:
    hashes = hashes_of(size, 5)
    packed = PackedHashes(b"".join(hashes), size)
    ends = (None, *range(-6, 7))
    for start, stop, step in product(ends, ends, (None, 1, 2, -1)):
        assert packed[start:stop:step] == hashes[start:stop:step], (start, stop, step)


@pytest.mark.parametrize("size", SIZES)
def test_single_hashes_are_those_of_a_list(size: int) -> None:
    hashes = hashes_of(size, 5)
    packed = PackedHashes(b"".join(hashes), size)
    assert [packed[index] for index in range(-5, 5)] == [*hashes, *hashes]
    assert list(packed) == hashes
    for outside in (-6, 5):
        with pytest.raises(IndexError):
            packed[outside]
