"""Headers of segments as they lie in the NVMe file: whose a segment is, since when.

Its header, 128 bytes, little-endian:

    offset  size  field
         0     4  magic, b"KVTS"
         4     2  format version
         6     2  zero
         8     8  generation of the pool
        16    16  namespace fingerprint
        32     8  sequence number: entries with a lower one are of a former life and void
        40     8  payload bytes of one shard
        48     4  shard count
        52     4  slot count
        56     8  id of the key that payloads are encrypted with, 0 for none
        64    60  zero
       124     4  CRC-32 of bytes 0..123
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from kvtier.layout import SegmentHeader, SlotLayout
from kvtier.pools.slot_table import ENTRY_BYTES, entry_crcs, right_crcs

HEADER_MAGIC = int.from_bytes(b"KVTS", "little")
HEADER_VERSION = 1

HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("zero", "<u2"),
        ("generation", "<u8"),
        ("fingerprint", "u1", (16,)),
        ("sequence", "<u8"),
        ("shard_bytes", "<u8"),
        ("shard_count", "<u4"),
        ("slot_count", "<u4"),
        ("key_id", "<u8"),
        ("zeros", "u1", (60,)),
        ("crc", "<u4"),
    ]
)
assert HEADER.itemsize == ENTRY_BYTES, "headers are checked by the same function as entries"

Headers = npt.NDArray[np.void]


def pack_headers(headers: Sequence[SegmentHeader], generation: int) -> Headers:
    """The headers as they are written."""
    packed: Headers = np.zeros(len(headers), HEADER)
    packed["magic"] = HEADER_MAGIC
    packed["version"] = HEADER_VERSION
    packed["generation"] = generation
    fingerprints = b"".join(header.fingerprint for header in headers)
    packed["fingerprint"] = np.frombuffer(fingerprints, np.uint8).reshape(-1, 16)
    packed["sequence"] = [header.sequence for header in headers]
    packed["shard_bytes"] = [header.layout.shard_bytes for header in headers]
    packed["shard_count"] = [header.layout.shard_count for header in headers]
    packed["slot_count"] = [header.slot_count for header in headers]
    packed["key_id"] = [header.key_id for header in headers]
    packed["crc"] = entry_crcs(packed)
    return packed


def sound_headers(headers: Headers, generation: int) -> npt.NDArray[np.bool_]:
    """Which of them say of themselves that they are whole and of this pool."""
    sound: npt.NDArray[np.bool_] = (
        (headers["magic"] == HEADER_MAGIC)
        & (headers["version"] == HEADER_VERSION)
        & (headers["generation"] == generation)
        & (headers["shard_bytes"] > 0)
        & (headers["shard_count"] > 0)
    )
    sound[sound] = right_crcs(headers[sound])
    return sound


def parse_headers(headers: Headers, segments: Iterable[int]) -> list[SegmentHeader]:
    """Those of these segments, which are sound. Column by column: NumPy is slow with single rows,
    and a large pool has ten thousand of them."""
    sizes = zip(
        headers["shard_bytes"].tolist(),
        headers["shard_count"].tolist(),
        (headers["key_id"] != 0).tolist(),
        strict=True,
    )
    layout_of = cache(SlotLayout)
    return [
        SegmentHeader(
            segment=segment,
            fingerprint=bytes(fingerprint),
            layout=layout_of(*size),
            slot_count=slot_count,
            sequence=sequence,
            key_id=key_id,
        )
        for segment, fingerprint, size, slot_count, sequence, key_id in zip(
            segments,
            headers["fingerprint"],
            sizes,
            headers["slot_count"].tolist(),
            headers["sequence"].tolist(),
            headers["key_id"].tolist(),
            strict=True,
        )
    ]
