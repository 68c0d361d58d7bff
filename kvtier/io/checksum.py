"""Payload checksums of blocks in slots: computed after commit, compared when bytes come back.

What a checksum is stands in kvtier/checksum.py, which the client uses too. Here a block is the
list of its shards' views, and a call takes a batch. The sums run at memory speed without the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.checksum import combine_checksums, shard_checksum
from kvtier.memory import Bytes

Checksums = npt.NDArray[np.uint64]


def block_checksum(shards: Sequence[Bytes]) -> int:
    """The checksum of one block, given its shards' payloads, shard 0 first."""
    return combine_checksums([shard_checksum(shard.data) for shard in shards])


def block_checksums(blocks: Sequence[Sequence[Bytes]]) -> Checksums:
    """The checksums of a batch of blocks."""
    return np.fromiter((block_checksum(shards) for shards in blocks), np.uint64, len(blocks))
