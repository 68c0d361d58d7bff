"""What a power cut does to the files of an NVMe pool, done to those of a daemon that was killed.

A kill alone loses nothing that the daemon has written: the kernel still has it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.layout import SegmentHeader
from kvtier.pools.nvme import NvmePool
from kvtier.pools.nvme_paths import open_paths, sorted_paths
from kvtier.pools.slot_table import ENTRY_BYTES
from kvtier.pools.superblock import (
    HEADERS_FIRST,
    SUPERBLOCK_BYTES,
    Geometry,
    parse_superblock,
)

SECTOR_BYTES = 512


@dataclass(frozen=True)
class _Stored:
    """One block, where its bytes are and where its entry is."""

    block_hash: bytes
    path: Path
    payload_first: int
    payload_bytes: int
    entry_first: int


def tear_payloads(paths: Sequence[Path], chance: random.Random, count: int) -> set[bytes]:
    """Damage blocks among those written last; their hashes."""
    found = _newest(paths)
    torn = chance.sample(found, min(count, len(found)))
    for one in torn:
        alike = [each for each in found if (each.path, each.payload_bytes) == _kind(one)]
        other = chance.choice(alike)
        before = _read(one.path, one.payload_first, one.payload_bytes)
        damage = chance.choice([_flip_bit, _lose_sectors, _mix])
        after = damage(before, chance, _read(one.path, other.payload_first, one.payload_bytes))
        if after == before:  # Mixed with itself.
            after = _flip_bit(before, chance, b"")
        _write(one.path, after, one.payload_first)
    return {one.block_hash for one in torn}


def tear_entries(paths: Sequence[Path], chance: random.Random) -> set[bytes]:
    """Damage one sector of the slot table; the hashes of the blocks whose entries were in it."""
    found = _newest(paths)
    if not found:
        return set()
    one = chance.choice(found)
    first = one.entry_first // SECTOR_BYTES * SECTOR_BYTES
    _write(one.path, chance.randbytes(SECTOR_BYTES), first)
    return {
        each.block_hash
        for each in found
        if each.path == one.path and first <= each.entry_first < first + SECTOR_BYTES
    }


class TableCopy:
    """The headers and the slot table of a pool, as the disk has them now; a daemon may have it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._parts: list[tuple[Path, bytes]] = []
        for path in paths:
            superblock = parse_superblock(_read(path, 0, SUPERBLOCK_BYTES))
            assert superblock is not None, f"{path} is no pool"
            length = superblock.geometry.recency_first - HEADERS_FIRST
            self._parts.append((path, _read(path, HEADERS_FIRST, length)))

    def put_back(self) -> None:
        """What was written to them since is lost."""
        for path, data in self._parts:
            _write(path, data, HEADERS_FIRST)


def _newest(paths: Sequence[Path], segment_count: int = 6) -> list[_Stored]:
    """The blocks of the segments that were begun last, in a fixed order."""
    drivers, _ = sorted_paths(open_paths(paths))
    names = [Path(driver.name) for driver in drivers]
    pool = NvmePool(drivers, writable=False)
    found = pool.recover(None)
    geometry = pool.geometry
    assert pool.close(clean=False)
    newest = sorted(found.lives, key=lambda life: -life[0].sequence)[:segment_count]
    headers = {header.segment: header for header, _ in newest}
    blocks: list[_Stored] = []
    for block, slot in zip(found.hashes, found.slots.tolist(), strict=True):
        segment, row = divmod(slot, geometry.row_count_max)
        if segment in headers:
            blocks.append(_stored(block.tobytes(), names, geometry, headers[segment], row))
    return blocks


def _stored(
    block_hash: bytes, names: Sequence[Path], geometry: Geometry, header: SegmentHeader, row: int
) -> _Stored:
    local, path = divmod(header.segment, geometry.path_count)
    segment_first = geometry.segments_first + local * geometry.segment_bytes
    table_first = geometry.table_first + local * geometry.table_segment_bytes
    layout = header.layout
    return _Stored(
        block_hash,
        names[path],
        segment_first + row * layout.slot_bytes,
        layout.shard_bytes,
        table_first + row * ENTRY_BYTES,
    )


def _kind(one: _Stored) -> tuple[Path, int]:
    return one.path, one.payload_bytes


def _read(path: Path, first: int, length: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        data = os.pread(file.fileno(), length, first)
    assert len(data) == length
    return data


def _write(path: Path, data: bytes, first: int) -> None:
    with path.open("r+b", buffering=0) as file:
        assert os.pwrite(file.fileno(), data, first) == len(data)
        os.fsync(file.fileno())


Damage = Callable[[bytes, random.Random, bytes], bytes]


def _flip_bit(before: bytes, chance: random.Random, _other: bytes) -> bytes:
    after = bytearray(before)
    after[chance.randrange(len(after))] ^= 1 << chance.randrange(8)
    return bytes(after)


def _lose_sectors(before: bytes, chance: random.Random, _other: bytes) -> bytes:
    """Some sectors never came to the disk."""
    after = bytearray(before)
    for _ in range(chance.randint(1, 8)):
        first = chance.randrange(len(after) // SECTOR_BYTES) * SECTOR_BYTES
        after[first : first + SECTOR_BYTES] = bytes(SECTOR_BYTES)
    return bytes(after)


def _mix(before: bytes, chance: random.Random, other: bytes) -> bytes:
    """From some sector on the slot holds another block's bytes, as before it was reused."""
    first = chance.randrange(len(before) // SECTOR_BYTES) * SECTOR_BYTES
    return before[:first] + other[first:]
