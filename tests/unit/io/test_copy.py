"""Copies: pieces of any size put a payload together, whatever its shards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.checksum import shard_checksum
from kvtier.io.copy import copy_batch, copy_summed, read_pieces, write_piece


def payload_of(length: int) -> bytes:
    return bytes(np.random.default_rng(length).integers(0, 256, length, np.uint8))


@given(
    shard_lengths=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    piece_bytes=st.integers(1, 60),
)
def test_pieces_written_one_after_another_are_the_payload(
    shard_lengths: list[int], piece_bytes: int
) -> None:
    shards = [np.zeros(length, np.uint8) for length in shard_lengths]
    payload = payload_of(sum(shard_lengths))
    for first in range(0, len(payload), piece_bytes):
        write_piece(shards, first, payload[first : first + piece_bytes])
    assert b"".join(bytes(shard) for shard in shards) == payload
    pieces = list(read_pieces(shards, piece_bytes))
    assert b"".join(pieces) == payload
    assert max(map(len, pieces)) <= piece_bytes


def test_a_piece_changes_no_byte_beside_it() -> None:
    shards = [np.zeros(4, np.uint8), np.zeros(4, np.uint8)]
    write_piece(shards, 3, b"\1\2")
    assert [shard.tolist() for shard in shards] == [[0, 0, 0, 1], [2, 0, 0, 0]]


def test_a_piece_beyond_the_payload_changes_nothing() -> None:
    shards = [np.zeros(4, np.uint8)]
    with pytest.raises(AssertionError, match="beyond"):
        write_piece(shards, 3, b"\1\2")
    assert not shards[0].any()


def test_a_batch_copies_each_source_to_its_target() -> None:
    sources = [np.full(8, value, np.uint8) for value in (1, 2, 3)]
    pool = np.zeros((3, 16), np.uint8)
    copy_batch([pool[2, :8], pool[0, :8], pool[1, :8]], sources)
    assert pool[:, :8].mean(axis=1).tolist() == [2, 3, 1]
    assert not pool[:, 8:].any()


def test_unequal_lengths_are_refused_before_a_byte_is_copied() -> None:
    targets = [np.zeros(8, np.uint8), np.zeros(8, np.uint8)]
    with pytest.raises(AssertionError, match="unequal"):
        copy_batch(targets, [np.ones(8, np.uint8), np.ones(1, np.uint8)])
    assert not any(target.any() for target in targets)


def test_a_piece_size_that_would_hold_the_gil_is_refused() -> None:
    with pytest.raises(AssertionError, match="GIL"):
        next(read_pieces([np.zeros(1 << 20, np.uint8)], 1 << 20))


@pytest.mark.parametrize("extra", [-1, 0, 1, 4096])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_summed_copy_sums_what_has_arrived_and_copies_the_padding(
    pieces: int, extra: int
) -> None:
    sum_bytes = pieces * (256 << 10) + extra
    chance = np.random.default_rng(sum_bytes)
    sources = [chance.integers(0, 256, sum_bytes + 96, np.uint8) for _ in range(2)]
    targets = [np.zeros_like(source) for source in sources]
    sums = copy_summed(targets, sources, sum_bytes)
    assert sums == [shard_checksum(source[:sum_bytes].data) for source in sources]
    assert np.array_equal(targets, sources)


def test_a_summed_copy_tells_of_bytes_that_did_not_arrive() -> None:
    """The sum is the target's: memory that keeps nothing must not look well."""

    class Deaf(np.ndarray):
        def __array_function__(self, func, types, args, kwargs):  # type: ignore[no-untyped-def]
            return None if func is np.copyto else super().__array_function__(*args)

    source = np.arange(1000, dtype=np.uint8)
    [found] = copy_summed([np.zeros(1000, np.uint8).view(Deaf)], [source], 1000)
    assert found == shard_checksum(bytes(1000))


def test_a_summed_copy_of_unequal_lengths_is_refused() -> None:
    with pytest.raises(AssertionError):
        copy_summed([np.zeros(9, np.uint8)], [np.zeros(8, np.uint8)], 8)


def test_a_summed_copy_into_memory_with_gaps_is_refused() -> None:
    """Its rows would be a copy: right sums of bytes that arrived nowhere."""
    gaps = np.zeros(2 * (512 << 10), np.uint8)[::2]
    with pytest.raises(AssertionError):
        copy_summed([gaps], [np.ones_like(gaps)], gaps.nbytes)
