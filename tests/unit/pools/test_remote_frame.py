"""The frame of a remote value: whatever differs from what is expected is a miss with its reason."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.memory import Bytes
from kvtier.pools.remote.frame import (
    HEADER_BYTES,
    BlockShape,
    FrameFault,
    FrameHeader,
    read_header,
    write_header,
)
from kvtier.types import BlockHash

BLOCK = BlockHash(hashlib.sha256(b"block").digest())
SHAPE = BlockShape(bytes(range(16)), epoch=7, shard_count=2, payload_bytes=1000)


def frame_of(shape: BlockShape = SHAPE, block: BlockHash = BLOCK, count_bytes: int = 1000) -> Bytes:
    frame = np.zeros(HEADER_BYTES + count_bytes, np.uint8)
    frame[HEADER_BYTES:] = np.arange(count_bytes) % 251
    write_header(frame, shape, block, codec=2, checksum=99)
    return frame


def test_a_frame_is_read_as_it_was_written() -> None:
    assert read_header(frame_of(), SHAPE, BLOCK) == FrameHeader(2, 99, 1000)


def test_a_short_hash_is_told_from_a_padded_one() -> None:
    short = BlockHash(BLOCK[:16])
    frame = frame_of(block=short)
    assert isinstance(read_header(frame, SHAPE, short), FrameHeader)
    assert read_header(frame, SHAPE, BlockHash(short.ljust(32, b"\0"))) is FrameFault.HASH


@pytest.mark.parametrize(
    ("shape", "block", "fault"),
    [
        (replace(SHAPE, fingerprint=bytes(16)), BLOCK, FrameFault.NAMESPACE),
        (replace(SHAPE, epoch=8), BLOCK, FrameFault.EPOCH),
        (SHAPE, BlockHash(bytes(32)), FrameFault.HASH),
        (replace(SHAPE, shard_count=1), BLOCK, FrameFault.SHAPE),
        (replace(SHAPE, payload_bytes=2000), BLOCK, FrameFault.SHAPE),
    ],
)
def test_another_block_is_a_miss(shape: BlockShape, block: BlockHash, fault: FrameFault) -> None:
    assert read_header(frame_of(shape, block), SHAPE, BLOCK) is fault


def test_a_version_that_is_not_ours_is_a_miss() -> None:
    frame = frame_of()
    frame[4] = 2
    assert read_header(frame, SHAPE, BLOCK) is FrameFault.VERSION


@pytest.mark.parametrize("count_bytes", [0, 1, HEADER_BYTES - 1])
def test_less_than_a_header_is_a_miss(count_bytes: int) -> None:
    assert read_header(frame_of()[:count_bytes], SHAPE, BLOCK) is FrameFault.SHORT


@pytest.mark.parametrize("change", [-1, 1])
def test_a_value_of_another_length_is_a_miss(change: int) -> None:
    frame = np.resize(frame_of(), HEADER_BYTES + 1000 + change)
    assert read_header(frame, SHAPE, BLOCK) is FrameFault.LENGTH


@given(place=st.integers(0, HEADER_BYTES + 999), bit=st.integers(0, 7))
def test_any_flipped_bit_is_a_miss(place: int, bit: int) -> None:
    frame = frame_of()
    frame[place] ^= 1 << bit
    assert isinstance(read_header(frame, SHAPE, BLOCK), FrameFault)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_a_miss(data: bytes) -> None:
    assert isinstance(read_header(np.frombuffer(data, np.uint8), SHAPE, BLOCK), FrameFault)
