"""Recovery of an NVMe pool: headers first, then the rows of the slot table that they give sense to.

An entry counts if and only if it is sound by itself (`recovery.py`), READY, of its segment's
present life (namespace, payload length, sequence number not below the header's) and of its
namespace's present epoch. Payloads are not read. Rows are read and judged in steps; those that
count go into the pool's own table, and of each only what the core wants to know is kept besides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.errors import KVTierError
from kvtier.io.alignment import aligned_buffer
from kvtier.io.driver import Access, Batch, Driver, Outcome
from kvtier.layout import SegmentHeader
from kvtier.memory import Bytes
from kvtier.pools.nvme_table import PAGE_ROWS
from kvtier.pools.recovery import newest_of, sound_entries
from kvtier.pools.segment_headers import HEADER, Headers, parse_headers, sound_headers
from kvtier.pools.slot_table import (
    ENTRY,
    ENTRY_BYTES,
    FINGERPRINT_WORD,
    HASH_BYTES_MAX,
    PAYLOAD_WORD,
    SEQUENCE_WORD,
    Entries,
    Slots,
    SlotState,
    SlotTable,
)
from kvtier.pools.superblock import HEADERS_FIRST, Geometry

if TYPE_CHECKING:
    from kvtier.pools.sealing import Sealer

_Mask = npt.NDArray[np.bool_]
STEP_ROWS = 65_536  # 8 MiB of the table, of which two are in memory.
_READ_BYTES = 1 << 20
_READ_ACCESSES_MAX = 1024


class TableUnreadable(KVTierError):
    """A read of the pool's own records failed; the message says where."""


@dataclass(frozen=True, slots=True)
class RecoveredBlocks:
    """What the pool holds, in columns of equal length in the order of slots."""

    slots: Slots
    hashes: Bytes  # One row of HASH_BYTES_MAX bytes a block, zero-padded as in the entries.
    parents: Bytes  # Likewise.
    hash_bytes: npt.NDArray[np.uint8]
    epochs: npt.NDArray[np.uint32]
    # Segments that hold blocks, each with its rows that do, ascending.
    lives: tuple[tuple[SegmentHeader, npt.NDArray[np.int64]], ...]
    void_slots: Slots  # Rows that are not empty and no block either; not in the columns.
    # Slots that hold a block, least recently used first; None unless the pool was closed cleanly.
    recency: Slots | None
    unread_count: int = 0  # Segments whose part of the table the disk did not give.


class _Found:
    """The columns while they are filled."""

    def __init__(self, count_max: int) -> None:
        self.count = 0
        # Memory that is never written to is never given.
        self.slots = np.empty(count_max, np.uint32)
        self.hashes = np.empty((count_max, HASH_BYTES_MAX), np.uint8)
        self.parents = np.empty((count_max, HASH_BYTES_MAX), np.uint8)
        self.hash_bytes = np.empty(count_max, np.uint8)
        self.epochs = np.empty(count_max, np.uint32)
        self.sequences = np.empty(count_max, np.uint64)
        self.namespaces = np.empty(count_max, np.uint64)  # Numbers of our own.
        self.void: list[Slots] = [np.empty(0, np.uint32)]

    def add(self, slots: Slots, rows: Entries, namespaces: npt.NDArray[np.uint64]) -> None:
        end = self.count + len(slots)
        part = slice(self.count, end)
        self.slots[part] = slots
        self.hashes[part] = rows["hash"]
        self.parents[part] = rows["parent"]
        self.hash_bytes[part] = rows["hash_bytes"]
        self.epochs[part] = rows["epoch"]
        self.sequences[part] = rows["sequence"]
        self.namespaces[part] = namespaces
        self.count = end

    def newest(self) -> _Mask:
        hashes = self.hashes[: self.count].view(np.uint64)
        keys = [*hashes.T, self.namespaces[: self.count]]
        return newest_of(keys, self.sequences[: self.count])


@dataclass(frozen=True, slots=True)
class _Step:
    """Rows of several segments, being read into one buffer."""

    headers: list[SegmentHeader]
    rows: Bytes
    batch: Batch


def read_headers(
    drivers: Sequence[Driver], geometry: Geometry, generation: int
) -> list[SegmentHeader]:
    """Every sound header that fits the pool, by segment."""
    found: list[SegmentHeader] = []
    for path, driver in enumerate(drivers):
        raw = read_area(driver, HEADERS_FIRST, geometry.table_first - HEADERS_FIRST)
        headers: Headers = raw[: geometry.segment_count * ENTRY_BYTES].view(HEADER)
        sound = np.flatnonzero(sound_headers(headers, generation))
        segments = (sound * geometry.path_count + path).tolist()
        found += [
            header for header in parse_headers(headers[sound], segments) if _fits(header, geometry)
        ]
    return sorted(found, key=lambda header: header.segment)


def read_blocks(
    drivers: Sequence[Driver],
    geometry: Geometry,
    headers: Sequence[SegmentHeader],
    epochs: Mapping[bytes, int] | None,
    table: SlotTable,
    sealer: Sealer | None = None,
) -> RecoveredBlocks:
    """Read the rows of these segments into the empty `table`, those that count. Without `epochs`
    entries of every epoch do. The order of use is not read here.

    What the disk does not give is empty: blocks are lost, the others are not. Raises
    TableUnreadable when it gives nothing, and in any such case without `epochs`: tools tell.
    """
    found = _Found(sum(header.slot_count for header in headers))
    numbers: dict[bytes, int] = {}
    unread_count = 0
    for step in _steps(drivers, geometry, headers):
        unread_count += _blank_unread(step)
        if unread_count and (epochs is None or unread_count == len(headers)):
            raise TableUnreadable("the slot table of the NVMe pool cannot be read")
        rows, slots, owners = _used_rows(step, geometry.row_count_max)
        ready = sound_entries(rows, table.generation) & (rows["state"] == SlotState.READY)
        if sealer is not None:
            rows, ready = _opened(sealer, step, rows, slots, owners, ready)
        ready &= _current(rows, owners, step.headers, epochs)
        if not ready.all():  # Seldom; as a rule a copy of all rows is saved.
            found.void.append(slots[~ready])
            slots, rows, owners = slots[ready], rows[ready], owners[ready]
        table.adopt(slots, rows)
        own = [numbers.setdefault(one.fingerprint, len(numbers)) for one in step.headers]
        found.add(slots, rows, np.array(own, np.uint64)[owners])
    kept: slice | _Mask = slice(found.count)
    newest = found.newest()
    if not newest.all():
        older = found.slots[kept][~newest]
        table.write_gone(older)
        found.void.append(older)
        kept = np.zeros(len(found.slots), np.bool_)
        kept[: found.count] = newest
    return RecoveredBlocks(
        slots=found.slots[kept],
        hashes=found.hashes[kept],
        parents=found.parents[kept],
        hash_bytes=found.hash_bytes[kept],
        epochs=found.epochs[kept],
        lives=lives_of(headers, found.slots[kept], geometry.row_count_max),
        void_slots=np.concatenate(found.void),
        recency=None,
        unread_count=unread_count,
    )


def lives_of(
    headers: Sequence[SegmentHeader], slots: Slots, row_count_max: int
) -> tuple[tuple[SegmentHeader, npt.NDArray[np.int64]], ...]:
    """The segments of these slots; both ascend."""
    segments, rows = np.divmod(slots.astype(np.int64), row_count_max)
    numbers = np.array([header.segment for header in headers], np.int64)
    starts = np.searchsorted(segments, numbers).tolist()
    ends = np.searchsorted(segments, numbers, side="right").tolist()
    return tuple(
        (header, rows[start:end])
        for header, start, end in zip(headers, starts, ends, strict=True)
        if start < end
    )


def read_area(driver: Driver, first: int, length_bytes: int) -> Bytes:
    """A part of one file, of our own records; raises TableUnreadable."""
    buffer = aligned_buffer(length_bytes)
    starts = range(0, length_bytes, _READ_BYTES)
    for begin in range(0, len(starts), _READ_ACCESSES_MAX):
        some = starts[begin : begin + _READ_ACCESSES_MAX]
        batch = Batch(len(some))
        driver.read(
            [
                Access(member, first + start, (buffer[start : start + _READ_BYTES],))
                for member, start in enumerate(some)
            ],
            batch,
        )
        failed = [outcome for outcome in batch.wait() if outcome is not Outcome.DONE]
        if failed:
            raise TableUnreadable(f"{driver.name} cannot be read at {first}: {failed[0]}")
    return buffer


def _fits(header: SegmentHeader, geometry: Geometry) -> bool:
    slots_bytes = header.slot_count * header.layout.slot_bytes
    return 0 < header.slot_count <= geometry.row_count_max and (
        slots_bytes <= geometry.segment_bytes
    )


def _steps(
    drivers: Sequence[Driver], geometry: Geometry, headers: Sequence[SegmentHeader]
) -> Iterator[_Step]:
    """One step ahead: while one is judged the next is being read. So a step ends with the turn of
    whoever iterates, and two buffers are enough: new memory for each would cost as much as judging.
    """
    before: _Step | None = None
    groups = list(_groups(headers))
    buffer_bytes = max((_group_bytes(group) for group in groups), default=0)
    buffers = (aligned_buffer(buffer_bytes), aligned_buffer(buffer_bytes))
    for number, group in enumerate(groups):
        step = _begin(drivers, geometry, group, buffers[number % 2])
        if before is not None:
            yield before
        before = step
    if before is not None:
        yield before


def _groups(headers: Sequence[SegmentHeader]) -> Iterator[list[SegmentHeader]]:
    group: list[SegmentHeader] = []
    row_count = 0
    for header in headers:
        count = _padded_rows(header)
        if group and (row_count + count > STEP_ROWS or len(group) == _READ_ACCESSES_MAX):
            yield group
            group, row_count = [], 0
        group.append(header)
        row_count += count
    if group:
        yield group


def _begin(
    drivers: Sequence[Driver], geometry: Geometry, group: list[SegmentHeader], buffer: Bytes
) -> _Step:
    batch = Batch(len(group))
    accesses: list[list[Access]] = [[] for _ in drivers]
    first = 0
    for member, header in enumerate(group):
        local, path = divmod(header.segment, geometry.path_count)
        end = first + _padded_rows(header) * ENTRY_BYTES
        offset = geometry.table_first + local * geometry.table_segment_bytes
        accesses[path].append(Access(member, offset, (buffer[first:end],)))
        first = end
    for driver, own in zip(drivers, accesses, strict=True):
        driver.read(own, batch)
    return _Step(group, buffer[:first], batch)


def _blank_unread(step: _Step) -> int:
    """Wait for the step, and empty what did not come; of how many segments that is. Raises
    TableUnreadable when the disk is not there any more."""
    outcomes = step.batch.wait()
    if Outcome.GONE in outcomes:
        raise TableUnreadable("the disk went away while the slot table was read")
    first = count = 0
    for header, outcome in zip(step.headers, outcomes, strict=True):
        end = first + _padded_rows(header) * ENTRY_BYTES
        if outcome is not Outcome.DONE:
            step.rows[first:end] = 0
            count += 1
        first = end
    return count


def _group_bytes(group: Sequence[SegmentHeader]) -> int:
    return sum(map(_padded_rows, group)) * ENTRY_BYTES


def _padded_rows(header: SegmentHeader) -> int:
    """Whole pages are read; the rows behind the last slot are not looked at."""
    return -(-header.slot_count // PAGE_ROWS) * PAGE_ROWS


def _used_rows(step: _Step, row_count_max: int) -> tuple[Entries, Slots, npt.NDArray[np.int64]]:
    """(rows that are not empty, their slots, the place of their header in the step)."""
    counts = np.array([_padded_rows(header) for header in step.headers])
    owners = np.repeat(np.arange(len(counts)), counts)
    rows_in_segment = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = np.array([header.segment * row_count_max for header in step.headers])
    slots = (firsts[owners] + rows_in_segment).astype(np.uint32)
    # An entry's head is zero while it holds nothing, whatever may be left behind it.
    used = step.rows.view(np.uint64)[:: ENTRY_BYTES // 8] != 0
    used &= rows_in_segment < np.array([header.slot_count for header in step.headers])[owners]
    rows: Entries = step.rows.view(ENTRY)
    return (rows, slots, owners) if used.all() else (rows[used], slots[used], owners[used])


def _opened(
    sealer: Sealer,
    step: _Step,
    rows: Entries,
    slots: Slots,
    owners: npt.NDArray[np.int64],
    ready: _Mask,
) -> tuple[Entries, _Mask]:
    """The rows as they were before they were sealed, and which of them are whole."""
    opened = rows.copy()
    numbers = np.flatnonzero(ready)
    some = opened[numbers]
    whole = sealer.open_entries(
        slots[numbers], some, [step.headers[owner] for owner in owners[numbers].tolist()]
    )
    opened[numbers] = some
    ready = ready.copy()
    ready[numbers] = whole
    return opened, ready


def _current(
    rows: Entries,
    owners: npt.NDArray[np.int64],
    headers: Sequence[SegmentHeader],
    epochs: Mapping[bytes, int] | None,
) -> _Mask:
    """Which rows are of their segment's present life and their namespace's epoch."""
    words = rows.view("<u8").reshape(-1, ENTRY_BYTES // 8)
    sequences = _column([one.sequence for one in headers], "<u8")
    ready: _Mask = words[:, SEQUENCE_WORD] >= sequences[owners]
    payloads = _column([one.layout.payload_bytes for one in headers], "<u8")
    ready &= words[:, PAYLOAD_WORD] == payloads[owners]
    packed = b"".join(one.fingerprint for one in headers)
    namespaces = np.frombuffer(packed, "<u8").reshape(-1, 2)
    for half in range(2):
        ready &= words[:, FINGERPRINT_WORD + half] == namespaces[owners, half]
    if epochs is not None:
        known = np.array([one.fingerprint in epochs for one in headers], np.bool_)
        current = _column([epochs.get(one.fingerprint, 0) for one in headers], "<u4")
        ready &= known[owners] & (rows["epoch"] == current[owners])
    return ready


def _column(values: Sequence[int], kind: str) -> npt.NDArray[np.unsignedinteger]:
    return np.array(values, kind)
