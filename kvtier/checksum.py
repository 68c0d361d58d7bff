"""The payload checksum of a block; pure, used by both sides.

xxh3-64 over the shards' xxh3-64 values (little-endian, shard 0 first), so that each shard can be
summed where it lies and in any order. Slot padding is not part of it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

    ByteView = Buffer
else:
    ByteView = object  # Anything with the buffer protocol.


def shard_checksum(shard: ByteView) -> int:
    """xxh3-64 of one shard's bytes; releases the GIL."""
    return xxhash.xxh3_64_intdigest(shard)


def begin_shard_checksum() -> xxhash.xxh3_64:
    """For a shard that comes in pieces: `update` with each in order, `intdigest` at the end."""
    return xxhash.xxh3_64()


def combine_checksums(shard_checksums: Sequence[int]) -> int:
    """The block's checksum out of those of its shards, shard 0 first; never 0."""
    packed = struct.pack(f"<{len(shard_checksums)}Q", *shard_checksums)
    # In the slot table 0 means "not computed": the one block in 2^64 that sums to 0 is given 1.
    return xxhash.xxh3_64_intdigest(packed) or 1


def block_checksum(block: ByteView, shard_bytes: int) -> int:
    """The checksum of a block whose shards lie side by side."""
    view = memoryview(block)
    assert shard_bytes > 0
    assert view.nbytes % shard_bytes == 0, "a block is a whole number of shards"
    return combine_checksums(
        [
            shard_checksum(view[first : first + shard_bytes])
            for first in range(0, view.nbytes, shard_bytes)
        ]
    )
