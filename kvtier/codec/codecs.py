"""Codecs for slow links: lossless, by byte planes, since KV is compressible in its exponents only.

An encoded payload is its planes one after the other, then the bytes that fill no whole element:

    size  field
       1  element width in bytes: the number of planes
       8  payload length, little-endian
     9*w  for each plane: 1 byte packed (1) or as it is (0), 8 bytes length
       …  the planes, then the rest

Plane i holds byte i of every element. A plane that does not shrink is kept as it is: mantissas
never do, so that encoding bf16 costs the time of its exponents. What a codec cannot decode raises
BadEncoding: the payload is a miss then. Everything long runs without the GIL.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvtier.errors import ConfigError
from kvtier.memory import Bytes

_PREFIX = struct.Struct("<BQ")
_PLANE = struct.Struct("<BQ")
WIDTHS = (1, 2, 4)
# A plane is tried on so many bytes, taken from four places: compressing a mantissa plane in vain
# takes longer than all the rest.
_SAMPLE_BYTES, _SAMPLE_PLACES = 16 << 10, 4
# Less than this is not worth the time it takes to decode.
_GAIN_MIN = 1.03
# Planes are woven in pieces that stay in a core's cache.
_WEAVE_ELEMENTS = 32 << 10
_ZSTD_LEVEL = 1  # Level 3 takes 2.6 times as long on exponents and makes them no smaller.


class BadEncoding(ValueError):
    """Not what this codec has written; the payload is a miss."""


class CodecId(IntEnum):
    """As in the frame of a value; numbers are never used again."""

    NONE = 0
    PLANES_LZ4 = 1
    PLANES_ZSTD = 2


@dataclass(frozen=True, slots=True)
class _Packer:
    """One plane: bytes to fewer bytes and back. `unpack` gets the length that must come out."""

    pack: Callable[[Bytes], bytes]
    unpack: Callable[[Bytes, int], bytes]


def is_available(codec: CodecId) -> bool:
    """Whether the package that it needs is installed."""
    try:
        _packer_of(codec)
    except ConfigError:
        return False
    return True


def encode(codec: CodecId, payload: Bytes, *, width: int) -> list[Bytes]:
    """What to send, as views to be laid one after the other; `width` is that of the KV's dtype.

    NONE sends the payload itself.
    """
    assert width in WIDTHS, f"no KV has elements of {width} bytes"
    if codec is CodecId.NONE:
        return [payload]
    packer = _packer_of(codec)
    count = payload.nbytes // width
    elements = payload[: count * width].reshape(count, width)
    heads, planes = [_PREFIX.pack(width, payload.nbytes)], []
    for number in range(width):
        plane = np.ascontiguousarray(elements[:, number])
        packed = np.frombuffer(packer.pack(plane), np.uint8) if _shrinks(packer, plane) else plane
        is_packed = packed.nbytes < plane.nbytes
        planes.append(packed if is_packed else plane)
        heads.append(_PLANE.pack(is_packed, planes[-1].nbytes))
    return [np.frombuffer(b"".join(heads), np.uint8), *planes, payload[count * width :]]


def decode(codec: CodecId, encoded: Bytes, into: Bytes) -> None:
    """Fill `into` with the payload; raises BadEncoding when the bytes cannot be that."""
    if codec is CodecId.NONE:
        if encoded.nbytes != into.nbytes:
            raise BadEncoding(f"{encoded.nbytes} bytes for a payload of {into.nbytes}")
        np.copyto(into, encoded)
        return
    width, planes, rest = _read_planes(encoded, into.nbytes)
    packer = _packer_of(codec)
    count = into.nbytes // width
    opened = [
        _unpacked(packer, plane, count) if is_packed else plane for is_packed, plane in planes
    ]
    if any(plane.nbytes != count for plane in opened) or rest.nbytes != into.nbytes % width:
        raise BadEncoding("the planes do not fill the payload")
    _weave(opened, into[: count * width])
    np.copyto(into[count * width :], rest)


def _read_planes(encoded: Bytes, payload_bytes: int) -> tuple[int, list[tuple[bool, Bytes]], Bytes]:
    """Width, (is packed, bytes) of each plane, and what is behind them."""
    if encoded.nbytes < _PREFIX.size:
        raise BadEncoding("no head")
    width, length = _PREFIX.unpack_from(encoded.data)
    start = _PREFIX.size + width * _PLANE.size
    if width not in WIDTHS or length != payload_bytes or encoded.nbytes < start:
        raise BadEncoding(f"width {width}, length {length}")
    planes = []
    for number in range(width):
        packed, size = _PLANE.unpack_from(encoded.data, _PREFIX.size + number * _PLANE.size)
        if packed > 1 or size > encoded.nbytes - start:
            raise BadEncoding("a plane ends outside")
        planes.append((packed == 1, encoded[start : start + size]))
        start += size
    return width, planes, encoded[start:]


def _unpacked(packer: _Packer, plane: Bytes, count: int) -> Bytes:
    return np.frombuffer(packer.unpack(plane, count), np.uint8)


def _shrinks(packer: _Packer, plane: Bytes) -> bool:
    """Whether a sample of the plane does."""
    if plane.nbytes <= _SAMPLE_BYTES * _SAMPLE_PLACES:
        return plane.nbytes > 0
    step = (plane.nbytes - _SAMPLE_BYTES) // (_SAMPLE_PLACES - 1)
    places = [plane[place * step :][:_SAMPLE_BYTES] for place in range(_SAMPLE_PLACES)]
    sample = np.concatenate(places)
    return len(packer.pack(sample)) * _GAIN_MIN < sample.nbytes


def _weave(planes: list[Bytes], into: Bytes) -> None:
    """Element i of `into` is byte i of each plane."""
    width, count = len(planes), len(planes[0])
    if width == 1:
        np.copyto(into, planes[0])
        return
    elements = into.reshape(count, width)
    for start in range(0, count, _WEAVE_ELEMENTS):
        end = start + _WEAVE_ELEMENTS
        for number, plane in enumerate(planes):
            np.copyto(elements[start:end, number], plane[start:end])


def _packer_of(codec: CodecId) -> _Packer:
    """Raises ConfigError when the package is not installed: `pip install kvtier[remote]`."""
    try:
        return _lz4() if codec is CodecId.PLANES_LZ4 else _zstd()
    except ImportError as error:
        raise ConfigError(f"codec {codec.name.lower()} needs kvtier[remote] ({error})") from None


def _lz4() -> _Packer:
    import lz4.block

    def unpack(plane: Bytes, count: int) -> bytes:
        try:
            out: bytes = lz4.block.decompress(plane.data, uncompressed_size=count)
        except lz4.block.LZ4BlockError as error:
            raise BadEncoding(str(error)) from None
        return out

    return _Packer(lambda plane: lz4.block.compress(plane.data, store_size=False), unpack)


_zstd_of_thread = threading.local()  # Its objects must not be shared; making one costs 20 µs.


def _zstd() -> _Packer:
    import zstandard

    if not hasattr(_zstd_of_thread, "packer"):
        compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        decompressor = zstandard.ZstdDecompressor()

        def unpack(plane: Bytes, count: int) -> bytes:
            # The frame says how long it will be, and is not believed beyond what may be.
            try:
                if zstandard.frame_content_size(plane.data) != count:
                    raise BadEncoding("a plane of another length")
                out: bytes = decompressor.decompress(plane.data, max_output_size=count)
            except zstandard.ZstdError as error:
                raise BadEncoding(str(error)) from None
            return out

        _zstd_of_thread.packer = _Packer(lambda plane: compressor.compress(plane.data), unpack)
    packer: _Packer = _zstd_of_thread.packer
    return packer
