"""The manifest of what is parked: what a later life needs beside slabs and the slot table.

A memfd with two halves, written in turn, so that a writer that dies between any two stores leaves
the half before whole:

    offset  size  field
         0     4  magic, b"KVH1"
         4     4  format version, little-endian like every number here
         8     8  number of the writing; of two sound halves the higher one counts
        16     4  length of the text
        20     4  CRC-32 of bytes 0..19 and the text
        24        text: JSON
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import asdict, dataclass
from typing import Any

from kvtier.io.memory import create_memfd

MAGIC = b"KVH1"
VERSION = 1
HALF_BYTES = 8 << 20  # Sparse; a slab set takes about 100 bytes, a session 200.
_HEAD = struct.Struct("<4sIQI")
_CRC = struct.Struct("<I")
_TEXT_AT = _HEAD.size + _CRC.size


@dataclass(frozen=True, slots=True)
class ParkedSet:
    """A slab set; its slabs are parked under their names."""

    fingerprint: str  # Hexadecimal, like all bytes here.
    slabs: tuple[str, ...]
    slot_first: int
    slot_count: int
    slot_bytes: int
    shard_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    generation: int
    table_version: int
    slot_next: int
    sets: tuple[ParkedSet, ...] = ()


class ManifestFile:
    """The memfd; one process writes."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: that of the life before, which is gone on with; it is ours then."""
        self.fd = create_memfd("kvtier-manifest", 2 * HALF_BYTES) if fd is None else fd
        found = _newest(self.fd)
        self._number = 0 if found is None else found[0]

    def write(self, manifest: Manifest) -> None:
        """When this returns the new one counts; until then the old one does."""
        text = json.dumps(asdict(manifest)).encode()
        assert len(text) <= HALF_BYTES - _TEXT_AT, "the manifest has outgrown its half"
        self._number += 1
        head = _HEAD.pack(MAGIC, VERSION, self._number, len(text))
        crc = _CRC.pack(zlib.crc32(text, zlib.crc32(head)))
        os.pwrite(self.fd, head + crc + text, self._number % 2 * HALF_BYTES)

    def close(self) -> None:
        os.close(self.fd)


def read_manifest(fd: int) -> Manifest | str:
    """The newest one that is whole, or why there is none that could be believed."""
    found = _newest(fd)
    if found is None:
        return "the manifest is torn, or none"
    _, version, text = found
    if version != VERSION:
        return f"the manifest has version {version}, this daemon reads version {VERSION}"
    try:
        fields = json.loads(text)
        sets = tuple(_parked_set(one) for one in fields.pop("sets"))
        return Manifest(sets=sets, **fields)
    except (ValueError, TypeError, KeyError) as error:
        return f"the manifest cannot be understood: {error!r}"


def _parked_set(fields: dict[str, Any]) -> ParkedSet:
    return ParkedSet(slabs=tuple(fields.pop("slabs")), **fields)


def _newest(fd: int) -> tuple[int, int, bytes] | None:
    halves = [half for at in range(2) if (half := _read_half(fd, at * HALF_BYTES)) is not None]
    return max(halves, default=None)


def _read_half(fd: int, offset: int) -> tuple[int, int, bytes] | None:
    """(number, version, text), or None for anything that is not whole."""
    head = os.pread(fd, _TEXT_AT, offset)
    if len(head) < _TEXT_AT:
        return None
    magic, version, number, length = _HEAD.unpack_from(head)
    (crc,) = _CRC.unpack_from(head, _HEAD.size)
    if magic != MAGIC or length > HALF_BYTES - _TEXT_AT:
        return None
    text = os.pread(fd, length, offset + _TEXT_AT)
    if zlib.crc32(text, zlib.crc32(head[: _HEAD.size])) != crc:
        return None
    return number, version, text
