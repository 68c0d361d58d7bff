"""From a block's views to the value that goes into a remote engine, and back; for threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import numpy as np

from kvtier.checksum import combine_checksums
from kvtier.codec.codecs import BadEncoding, CodecId, decode, encode
from kvtier.errors import ConfigError
from kvtier.io.checksum import block_checksum
from kvtier.io.copy import copy_summed
from kvtier.memory import Bytes
from kvtier.pools.remote.buffers import Buffers
from kvtier.pools.remote.engine import Value
from kvtier.pools.remote.frame import (
    HEADER_BYTES,
    BlockShape,
    FrameFault,
    FrameHeader,
    plain_header,
    read_header,
    write_header,
)
from kvtier.pools.remote.sealed_header import is_sealed
from kvtier.types import BlockHash

if TYPE_CHECKING:  # It needs cryptography, which only those who encrypt have.
    from kvtier.pools.remote.sealing import ValueSealer


@dataclass(frozen=True, slots=True)
class BlockViews:
    """One block in a slot: a view a shard, shard 0 first. `checksum` of the payload, for a put."""

    block: BlockHash
    shards: Sequence[Bytes]
    checksum: int = 0


def joined(shards: Sequence[Bytes]) -> Bytes:
    """The payload in one piece; without a copy when it is in one already."""
    return shards[0] if len(shards) == 1 else np.concatenate(shards)


def framed(
    one: BlockViews,
    shape: BlockShape,
    codec: CodecId,
    *,
    width: int,
    take: Callable[[int], Bytes],
) -> Value | FrameFault:
    """The value to put: a copy. CHECKSUM when the block is not what its checksum says any more."""
    if codec is CodecId.NONE:
        frame = take(HEADER_BYTES + shape.payload_bytes)
        # Of what goes out; a block that is scribbled over now is found out at the get.
        checksum = copied_checksum(split(frame[HEADER_BYTES:], shape), one.shards, shape)
    else:
        parts = encode(codec, joined(one.shards), width=width)
        frame = take(HEADER_BYTES + sum(part.nbytes for part in parts))
        np.concatenate(parts, out=frame[HEADER_BYTES:])
        checksum = block_checksum(one.shards)
    if checksum != one.checksum:
        return FrameFault.CHECKSUM
    write_header(frame, shape, one.block, codec=codec, checksum=checksum)
    return [frame]


class InPlace(Sequence[Bytes]):
    """As `framed` without a codec, no copy: a header, and the block where it is.

    Whoever sends it sums it when it is sent, which hides behind the engine's own work: 64 MiB went
    to Redis in 24 ms so, in 26 when each block was summed first. One that is not what its checksum
    says any more has `fault` set then, and is deleted again. Who reads it before that finds another
    checksum than its header's: a miss.
    """

    def __init__(self, one: BlockViews, shape: BlockShape) -> None:
        self._one = one
        self._header = plain_header(shape, one.block, checksum=one.checksum)
        self.nbytes = HEADER_BYTES + shape.payload_bytes
        self.fault: FrameFault | None = None

    def is_right(self) -> bool:
        """Sums the block. To be asked when the parts were read."""
        if block_checksum(self._one.shards) != self._one.checksum:
            self.fault = FrameFault.CHECKSUM
        return self.fault is None

    def __len__(self) -> int:
        return 1 + len(self._one.shards)

    @overload
    def __getitem__(self, index: int) -> Bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Bytes]: ...

    def __getitem__(self, index: int | slice) -> Bytes | Sequence[Bytes]:
        return [self._header, *self._one.shards][index]


def bytes_of(value: Value) -> int:
    return value.nbytes if isinstance(value, InPlace) else sum(part.nbytes for part in value)


def np_empty(count_bytes: int) -> Bytes:
    return np.empty(count_bytes, np.uint8)


def unframed(value: Bytes, one: BlockViews, shape: BlockShape) -> FrameHeader | FrameFault:
    """Fill the block's views from the value, if it is the block; its header then."""
    header = read_header(value, shape, one.block)
    if isinstance(header, FrameFault):
        return header
    try:
        codec = CodecId(header.codec)
        payload = value[HEADER_BYTES:]
        if codec is not CodecId.NONE:
            payload = np.empty(shape.payload_bytes, np.uint8)
            decode(codec, value[HEADER_BYTES:], payload)
        elif payload.nbytes != shape.payload_bytes:
            return FrameFault.SHAPE
    except (ValueError, BadEncoding, ConfigError):
        return FrameFault.CODEC
    if copied_checksum(one.shards, split(payload, shape), shape) != header.checksum:
        return FrameFault.TORN if codec is CodecId.NONE else FrameFault.CHECKSUM
    return header


def sealed(
    sealer: ValueSealer,
    one: BlockViews,
    shape: BlockShape,
    frame: Callable[[], Value | FrameFault],
    buffers: Buffers,
) -> Value | FrameFault:
    """What `frame` gives, encrypted."""
    value = frame()
    if isinstance(value, FrameFault):
        return value
    [plain] = value
    found = sealer.seal(plain, shape, one.block, buffers.take)
    buffers.give_back(plain)
    return [found]


def unsealed(
    sealer: ValueSealer | None,
    value: Bytes,
    one: BlockViews,
    shape: BlockShape,
    buffers: Buffers,
) -> FrameHeader | FrameFault:
    """As `unframed`, of a value as the engine gave it."""
    if sealer is None:
        return FrameFault.KEY if is_sealed(value) else unframed(value, one, shape)
    frame = sealer.open(value, shape, one.block, buffers.take)
    if isinstance(frame, FrameFault):
        return frame
    found = unframed(frame, one, shape)
    buffers.give_back(frame)
    return found


def copied_checksum(targets: Sequence[Bytes], sources: Sequence[Bytes], shape: BlockShape) -> int:
    """Copy a block's shards; the block's checksum as it has arrived."""
    return combine_checksums(copy_summed(targets, sources, shape.shard_bytes))


def split(payload: Bytes, shape: BlockShape) -> list[Bytes]:
    size = shape.shard_bytes
    return [payload[start : start + size] for start in range(0, payload.nbytes, size)]
