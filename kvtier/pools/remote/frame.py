"""The frame of a value in a remote engine: who it is, said beside the bytes, and compared.

    offset  size  field
         0     4  magic, b"KVR1"
         4     2  format version, little-endian
         6     1  codec of the payload
         7     1  block hash length
         8    16  namespace fingerprint
        24     4  epoch of the namespace
        28     4  shard count
        32    32  block hash, zero-padded
        64     8  payload length in bytes, all shards
        72     8  length of the encoded payload, which follows the header
        80     8  checksum of the payload, as in the slot tables: xxh3-64 over the shards' xxh3-64
        88     8  xxh3-64 of the encoded payload; without a codec the payload's checksum once more
        96    28  zero
       124     4  CRC-32 of bytes 0..123

A value is the block if and only if all of it is what the reader expects. Anything else is a miss
with a reason: a remote engine may be old, torn, full of other users' values, or lie. A reader that
does not know the version misses, too; so versions may live beside each other in one engine, each
daemon seeing its own blocks only, and an upgrade needs no order.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvtier.checksum import shard_checksum
from kvtier.memory import Bytes
from kvtier.types import BlockHash

MAGIC = b"KVR1"
VERSION = 1
NO_CODEC = 0
HEADER_BYTES = 128
_HEAD = struct.Struct("<4sHBB16sII32sQQQQ28x")
_CRC = struct.Struct("<I")
_HASH_BYTES_MAX = 32


class FrameFault(StrEnum):
    """Why a value is not the block that was asked for."""

    SHORT = "short"  # Not even a header.
    UNSEALED = "unsealed"  # In the clear, though this daemon has keys: anybody could have made it.
    KEY = "key"  # Sealed with a key that this daemon has not.
    SEAL = "seal"  # Not what was sealed under this name.
    MAGIC = "magic"
    VERSION = "version"
    TORN_HEADER = "torn_header"
    NAMESPACE = "namespace"
    EPOCH = "epoch"
    HASH = "hash"
    SHAPE = "shape"  # Another payload length or shard count.
    LENGTH = "length"  # The value is longer or shorter than its header says.
    TORN = "torn"  # The checksum of what follows the header differs.
    CODEC = "codec"  # One that this daemon has not, or that cannot decode the bytes.
    CHECKSUM = "checksum"  # The payload's own differs after decoding.


# What the nodes' configurations have made of it, not the engine.
KEY_FAULTS = frozenset({FrameFault.UNSEALED, FrameFault.KEY})


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What all blocks of one namespace and epoch have in common."""

    fingerprint: bytes
    epoch: int
    shard_count: int
    payload_bytes: int

    def __post_init__(self) -> None:
        assert len(self.fingerprint) == 16, "a fingerprint has 16 bytes"
        assert self.epoch != 0, "no namespace has epoch 0"
        assert self.payload_bytes % self.shard_count == 0, "shards are equally long"

    @property
    def shard_bytes(self) -> int:
        return self.payload_bytes // self.shard_count


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a sound frame says of its payload, beyond what was expected of it."""

    codec: int
    checksum: int
    encoded_bytes: int


def write_header(
    frame: Bytes, shape: BlockShape, block: BlockHash, *, codec: int, checksum: int
) -> None:
    """Fill in the first HEADER_BYTES; the encoded payload is what lies behind them."""
    encoded = frame[HEADER_BYTES:]
    torn = checksum if codec == NO_CODEC else shard_checksum(encoded.data)
    np.copyto(frame[:HEADER_BYTES], _header(shape, block, codec, encoded.nbytes, checksum, torn))


def plain_header(shape: BlockShape, block: BlockHash, *, checksum: int) -> Bytes:
    """The header of a payload that goes as it is, and lies elsewhere."""
    return _header(shape, block, NO_CODEC, shape.payload_bytes, checksum, checksum)


def _header(
    shape: BlockShape,
    block: BlockHash,
    codec: int,
    encoded_bytes: int,
    checksum: int,
    torn: int,
) -> Bytes:
    assert 16 <= len(block) <= _HASH_BYTES_MAX
    body = _HEAD.pack(
        *(MAGIC, VERSION, codec, len(block), shape.fingerprint, shape.epoch, shape.shard_count),
        *(block, shape.payload_bytes, encoded_bytes, checksum, torn),
    )
    return np.frombuffer(body + _CRC.pack(zlib.crc32(body)), np.uint8)


def read_header(frame: Bytes, shape: BlockShape, block: BlockHash) -> FrameHeader | FrameFault:
    """The header of the block that is expected, or the first difference.

    The encoded payload's checksum is compared as well, so that no decoder sees torn bytes. Without
    a codec there is no decoder: whoever copies the payload compares its checksum, and must.
    """
    if frame.nbytes < HEADER_BYTES:
        return FrameFault.SHORT
    header = frame[:HEADER_BYTES].data
    magic, version, codec, hash_bytes, *rest = _HEAD.unpack_from(header)
    fingerprint, epoch, shard_count, padded, payload_bytes, encoded_bytes, checksum, torn = rest
    crc = zlib.crc32(header[: _HEAD.size])
    encoded = frame[HEADER_BYTES:]
    differences = (
        (magic != MAGIC, FrameFault.MAGIC),
        (version != VERSION, FrameFault.VERSION),
        (_CRC.unpack_from(header, _HEAD.size) != (crc,), FrameFault.TORN_HEADER),
        (fingerprint != shape.fingerprint, FrameFault.NAMESPACE),
        (epoch != shape.epoch, FrameFault.EPOCH),
        ((hash_bytes, padded) != (len(block), block.ljust(32, b"\0")), FrameFault.HASH),
        (
            (shard_count, payload_bytes) != (shape.shard_count, shape.payload_bytes),
            FrameFault.SHAPE,
        ),
        (encoded_bytes != encoded.nbytes, FrameFault.LENGTH),
    )
    for differs, fault in differences:
        if differs:
            return fault
    if torn != (checksum if codec == NO_CODEC else shard_checksum(encoded.data)):
        return FrameFault.TORN
    return FrameHeader(codec, checksum, encoded_bytes)
