"""Payload checksums: xxh3-64, computed once after commit and compared when bytes come back.

A block's checksum is xxh3-64 over its shards' xxh3-64 values (little-endian u64, shard 0 first),
for one shard too: so workers can sum their own shard without seeing the others. Memory runs at
full speed and without the GIL; a call takes a batch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.memory import Bytes

Checksums = npt.NDArray[np.uint64]

# In the slot table 0 means "not computed", so the one block in 2^64 that sums to 0 is given 1.
_INSTEAD_OF_ZERO = 1


def block_checksum(shards: Sequence[Bytes]) -> int:
    """The checksum of one block, given its shards' payloads, shard 0 first. Never 0."""
    return combine_shards([xxhash.xxh3_64_intdigest(shard.data) for shard in shards])


def block_checksums(blocks: Sequence[Sequence[Bytes]]) -> Checksums:
    """The checksums of a batch of blocks."""
    return np.fromiter((block_checksum(shards) for shards in blocks), np.uint64, len(blocks))


def combine_shards(shard_checksums: Sequence[int]) -> int:
    """The block's checksum from its shards' xxh3-64 values."""
    packed = struct.pack(f"<{len(shard_checksums)}Q", *shard_checksums)
    return xxhash.xxh3_64_intdigest(packed) or _INSTEAD_OF_ZERO
