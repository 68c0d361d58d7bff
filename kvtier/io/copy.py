"""Copies between slots, and between slots and the byte strings of put and get.

The GIL rule of the daemon: no operation may hold it on block-sized data. np.copyto lets it go;
`tobytes`, and anything else that makes a bytes object, does not: so values are cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvtier.checksum import begin_shard_checksum
from kvtier.memory import Bytes

PIECE_BYTES_MAX = 256 << 10  # About 25 µs with the GIL held.
# Copied and then summed: the piece is still in a cache for the second step. Smaller ones cost more
# waits for the GIL: with two threads 256 KiB reached 0.62 to 0.75 of a bare copy, this 0.73 to
# 0.76.
_SUMMED_BYTES = 1 << 20


def copy_batch(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    """Copy each source into its target; the lengths must agree."""
    pairs = list(zip(targets, sources, strict=True))
    for target, source in pairs:
        # copyto would stretch a source of one byte over its whole target.
        assert target.shape == source.shape, "a copy between unequal lengths"
    for target, source in pairs:
        np.copyto(target, source)


def copy_summed(targets: Sequence[Bytes], sources: Sequence[Bytes], sum_bytes: int) -> list[int]:
    """As `copy_batch`; the xxh3-64 of the first `sum_bytes` of each target, as they arrived.

    One pass over the memory: the sum costs about a tenth of the copy instead of half.
    """
    pairs = list(zip(targets, sources, strict=True))
    for target, source in pairs:
        assert target.shape == source.shape, "a copy between unequal lengths"
        assert 0 < sum_bytes <= target.nbytes, "a sum of bytes that are not copied"
        # Rows of anything else might be a copy, which would be filled and summed instead.
        assert target.flags.c_contiguous, "a target with gaps"
    return [_copy_one_summed(target, source, sum_bytes) for target, source in pairs]


def _copy_one_summed(target: Bytes, source: Bytes, sum_bytes: int) -> int:
    shard_sum = begin_shard_checksum()
    for piece, origin in zip(_pieces(target[:sum_bytes]), _pieces(source[:sum_bytes]), strict=True):
        np.copyto(piece, origin)
        shard_sum.update(piece)
    if sum_bytes < target.nbytes:
        np.copyto(target[sum_bytes:], source[sum_bytes:])
    return shard_sum.intdigest()


def _pieces(view: Bytes) -> Iterator[Bytes]:
    """Rows of a reshaped view take less time under the GIL than slices."""
    whole = view.nbytes // _SUMMED_BYTES * _SUMMED_BYTES
    yield from view[:whole].reshape(-1, _SUMMED_BYTES)
    if whole < view.nbytes:
        yield view[whole:]


def write_piece(shards: Sequence[Bytes], first: int, piece: bytes | memoryview) -> None:
    """Write a piece of a payload (shard 0's bytes, then shard 1's, …) at byte `first` of it."""
    source = np.frombuffer(piece, np.uint8)
    assert first + len(source) <= sum(map(len, shards)), "the piece ends beyond the payload"
    for shard in shards:
        if first < len(shard) and len(source):
            count = min(len(source), len(shard) - first)
            np.copyto(shard[first : first + count], source[:count])
            source = source[count:]
        first = max(0, first - len(shard))


def read_pieces(shards: Sequence[Bytes], piece_bytes: int = PIECE_BYTES_MAX) -> Iterator[bytes]:
    """The payload in pieces of at most `piece_bytes`; none crosses from one shard to the next."""
    assert 0 < piece_bytes <= PIECE_BYTES_MAX, "a piece this large would hold the GIL too long"
    for shard in shards:
        for first in range(0, len(shard), piece_bytes):
            yield shard[first : first + piece_bytes].tobytes()  # gil-ok: 256 KiB at most
