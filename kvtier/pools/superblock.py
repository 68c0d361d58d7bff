"""Superblock of an NVMe pool's file or device: what it is, and where everything in it lies; pure.

    area            offset                      size
    superblock      0, and a copy at 32 KiB     4 KiB each
    headers         64 KiB                      128 bytes a segment
    slot table      behind it                   128 bytes a slot, row_count_max slots a segment
    recency order   behind it                   4 bytes a slot of the whole pool
    segments        behind it                   segment_bytes each

Areas begin at multiples of 4 KiB, segments at multiples of 2 MiB (of segment_bytes, if smaller).

Of the two copies the one with the higher revision counts; they are written one after the other, so
that one of them is always whole. `life` counts how often the pool was opened for writing. Sequence
numbers begin at life << 40: those of a former life are always lower, even of writes that a crash
has taken from us.

Upgrade rule. `version` is the format of the writer, `reader_version_min` the oldest format whose
code reads it right. Code of format V opens a file if reader_version_min <= V, and if version is V
or one that it can bring to V in place (`UPGRADED_FROM`); else it refuses, and the file must be
formatted: blocks are lost, never misread. A change that old code would misread raises both numbers.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace

from kvtier.errors import ConfigError
from kvtier.layout import PAD_BYTES, SEGMENT_BYTES
from kvtier.pools.slot_table import ENTRY_BYTES

MAGIC = b"kvtierNV"
FORMAT_VERSION = 1
UPGRADED_FROM: tuple[int, ...] = ()
SUPERBLOCK_BYTES = 4096
COPY_OFFSETS = (0, 32 << 10)
HEADERS_FIRST = 64 << 10
RECENCY_BYTES = 4
LIFE_MAX = (1 << 24) - 1
_REVISION_MAX = 1 << 63  # Nobody gets there by counting.
SEQUENCES_PER_LIFE_BITS = 40
# Slots smaller than 64 KiB leave room in a segment unused; more rows cost 128 bytes each.
ROW_COUNT_MAX = 4096
_SEGMENT_ALIGN_BYTES = 2 << 20
# Slots have numbers of 32 bits.
_SEGMENT_BYTES_MAX, _SEGMENT_COUNT_MAX = 1 << 32, 1 << 20

# magic, version, reader_version_min, flags, pool id, generation, life, revision, segment bytes,
# segment count, row count, path index, path count, recency count, recency checksum.
_FIELDS = struct.Struct("<8sHHI16sQQQQQIHHQQ")
_CRC = struct.Struct("<I")
_CLEAN = 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where things lie in one file; equal in all files of a pool."""

    segment_bytes: int
    segment_count: int  # Of this file.
    row_count_max: int
    path_count: int

    @property
    def is_possible(self) -> bool:
        """Whether anybody could have formatted a path so."""
        return (
            0 < self.segment_bytes <= _SEGMENT_BYTES_MAX
            and self.segment_bytes % PAD_BYTES == 0
            and 0 < self.segment_count <= _SEGMENT_COUNT_MAX
            and 0 < self.row_count_max <= ROW_COUNT_MAX
            and self.row_count_max * ENTRY_BYTES % PAD_BYTES == 0
            and self.path_count > 0
        )

    @property
    def table_first(self) -> int:
        return HEADERS_FIRST + _up(self.segment_count * ENTRY_BYTES, PAD_BYTES)

    @property
    def table_segment_bytes(self) -> int:
        """The part of the slot table that is of one segment."""
        return self.row_count_max * ENTRY_BYTES

    @property
    def recency_first(self) -> int:
        return self.table_first + self.segment_count * self.table_segment_bytes

    @property
    def recency_count_max(self) -> int:
        return self.segment_count * self.path_count * self.row_count_max

    @property
    def segments_first(self) -> int:
        end = self.recency_first + self.recency_count_max * RECENCY_BYTES
        return _up(end, min(_SEGMENT_ALIGN_BYTES, self.segment_bytes))

    @property
    def length_bytes(self) -> int:
        return self.segments_first + self.segment_count * self.segment_bytes


@dataclass(frozen=True, slots=True)
class Superblock:
    """One path's record of itself and of the pool it belongs to."""

    pool_id: bytes  # 16 random bytes.
    generation: int
    geometry: Geometry
    path_index: int
    life: int = 0
    revision: int = 0
    is_clean: bool = False
    recency_count: int = 0
    recency_checksum: int = 0
    version: int = FORMAT_VERSION
    reader_version_min: int = FORMAT_VERSION

    @property
    def sequence_first(self) -> int:
        return max(1, self.life << SEQUENCES_PER_LIFE_BITS)

    def next_revision(self, **changes: object) -> Superblock:
        changed: Superblock = replace(self, revision=self.revision + 1, **changes)  # type: ignore[arg-type]
        return changed

    def pack(self) -> bytes:
        geometry = self.geometry
        body = _FIELDS.pack(
            MAGIC,
            self.version,
            self.reader_version_min,
            _CLEAN if self.is_clean else 0,
            self.pool_id,
            self.generation,
            self.life,
            self.revision,
            geometry.segment_bytes,
            geometry.segment_count,
            geometry.row_count_max,
            self.path_index,
            geometry.path_count,
            self.recency_count,
            self.recency_checksum,
        )
        body = body.ljust(SUPERBLOCK_BYTES - _CRC.size, b"\0")
        return body + _CRC.pack(zlib.crc32(body))


def parse_superblock(raw: bytes) -> Superblock | None:
    """One copy; None when it is no superblock, not a whole one, or of a pool that cannot be."""
    if len(raw) != SUPERBLOCK_BYTES or not raw.startswith(MAGIC):
        return None
    body, (crc,) = raw[: -_CRC.size], _CRC.unpack(raw[-_CRC.size :])
    if zlib.crc32(body) != crc:
        return None
    fields = _FIELDS.unpack_from(raw)
    _, version, reader_min, flags, pool_id, generation, life, revision = fields[:8]
    segment_bytes, segment_count, row_count, path_index, path_count = fields[8:13]
    geometry = Geometry(segment_bytes, segment_count, row_count, path_count)
    if not (geometry.is_possible and path_index < path_count):
        return None
    if life >= LIFE_MAX or revision >= _REVISION_MAX:
        return None
    return Superblock(
        pool_id=pool_id,
        generation=generation,
        geometry=geometry,
        path_index=path_index,
        life=life,
        revision=revision,
        is_clean=bool(flags & _CLEAN),
        recency_count=fields[13],
        recency_checksum=fields[14],
        version=version,
        reader_version_min=reader_min,
    )


def newer(first: Superblock | None, second: Superblock | None) -> Superblock | None:
    """Of two copies the one that counts."""
    if first is None or second is None:
        return first or second
    return first if first.revision >= second.revision else second


def assert_readable(found: Superblock, name: str) -> None:
    """Raise ConfigError for a format that this code does not know; see the upgrade rule."""
    known = found.version == FORMAT_VERSION or found.version in UPGRADED_FROM
    later = found.version > FORMAT_VERSION and found.reader_version_min <= FORMAT_VERSION
    if not (known or later):
        raise ConfigError(
            f"{name} has format version {found.version}, this kvtier knows {FORMAT_VERSION}: use "
            "the kvtier that wrote it, or `kvtier format --force` it, which loses its blocks"
        )


def fitting_geometry(
    length_bytes: int,
    *,
    path_count: int,
    segment_bytes: int = SEGMENT_BYTES,
    row_count_max: int = ROW_COUNT_MAX,
) -> Geometry:
    """As many segments as fit; ConfigError when none does."""
    assert segment_bytes % PAD_BYTES == 0
    assert row_count_max * ENTRY_BYTES % PAD_BYTES == 0, "a segment's entries fill whole pages"
    # No slot is smaller than the padding, so that more rows would never be used.
    slot_count_max = _up(segment_bytes // PAD_BYTES, PAD_BYTES // ENTRY_BYTES)
    row_count = min(row_count_max, slot_count_max)
    record_bytes = ENTRY_BYTES * (row_count + 1) + RECENCY_BYTES * row_count * path_count
    geometry = Geometry(segment_bytes, 0, row_count, path_count)
    # Rounding up costs less than one segment, so that this is at most one too many.
    count = max(0, length_bytes - HEADERS_FIRST) // (segment_bytes + record_bytes)
    if count and replace(geometry, segment_count=count).length_bytes > length_bytes:
        count -= 1
    if count == 0:
        raise ConfigError(
            f"{length_bytes} bytes are too few for one segment of {segment_bytes} bytes"
        )
    return replace(geometry, segment_count=count)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
