"""What an NVMe pool knows of itself, in memory, and its way to the disk: slot table and headers.

Changes are made in memory and marked by pages of 4 KiB; `write` sends the marked pages, as they are
then, and nobody waits for it. Nothing orders these writes and nothing needs to: an entry on the
disk that is older, newer or torn is refuted by its CRC, by its segment's header or by the checksum
of its payload. One write is under way at a time, since two of the same page might change places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvtier.io.alignment import aligned_buffer
from kvtier.io.driver import Access, Batch, Driver, Outcome
from kvtier.layout import PAD_BYTES, SegmentHeader
from kvtier.memory import Bytes
from kvtier.pools.segment_headers import pack_headers
from kvtier.pools.slot_table import ENTRY_BYTES, Slots, SlotTable
from kvtier.pools.superblock import HEADERS_FIRST, Geometry

if TYPE_CHECKING:
    from kvtier.pools.sealing import Sealer

PAGE_ROWS = PAD_BYTES // ENTRY_BYTES
# In one write of the table; the pages beyond wait for the next one. Pages side by side cost as much
# as one, 15 to 40 µs, and the event loop waits meanwhile: 5 ms at worst.
WRITE_PAGES_MAX = 192

_Page = TypeVar("_Page", int, tuple[int, int])


class TableImage:
    """Slots are numbered over all paths: segment s lies on path s % path_count."""

    def __init__(
        self,
        drivers: Sequence[Driver],
        geometry: Geometry,
        generation: int,
        sealer: Sealer | None = None,
    ) -> None:
        self._drivers = drivers
        self._geometry = geometry
        self._generation = generation
        self._sealer = sealer
        self._key_ids: dict[int, int] = {}  # By segment, of those with sealed entries.
        row_count = geometry.segment_count * geometry.path_count * geometry.row_count_max
        self.table = SlotTable(generation, grow_slots=row_count)
        header_bytes = geometry.table_first - HEADERS_FIRST
        self._headers = [np.zeros(header_bytes, np.uint8) for _ in drivers]
        # Ordered, so that a run is the same each time.
        self._dirty_pages: dict[int, None] = {}
        self._dirty_headers: dict[tuple[int, int], None] = {}  # (path, page)
        self._under_way: tuple[Batch, list[range], list[tuple[int, int]]] | None = None
        self.written_bytes = 0  # Sent to the disk, whatever became of it.

    @property
    def dirty_count(self) -> int:
        """Pages whose last change no write has confirmed."""
        count = len(self._dirty_pages) + len(self._dirty_headers)
        if self._under_way is not None:
            _, runs, headers = self._under_way
            count += sum(map(len, runs)) + len(headers)
        return count

    def mark(self, slots: Slots) -> None:
        """The entries of these slots have changed."""
        self._dirty_pages.update(dict.fromkeys((slots // PAGE_ROWS).tolist()))

    def empty(self, segment: int, slot_count: int) -> None:
        """The first `slot_count` rows of this segment hold nothing; only those that did are sent.

        Rows behind them were never touched: looking at them would give the table memory there.
        """
        first = segment * self._geometry.row_count_max
        slots = (first + self.table.used_rows(first, slot_count)).astype(np.uint32)
        self.table.write_gone(slots)
        self.mark(slots)

    def put_headers(self, headers: Sequence[SegmentHeader], *, on_disk: bool = False) -> None:
        """These lives of segments have begun; `on_disk`: as they were read from there."""
        if not headers:
            return
        packed = pack_headers(headers, self._generation).view(np.uint8).reshape(-1, ENTRY_BYTES)
        segments = np.array([header.segment for header in headers], np.int64)
        rows, paths = np.divmod(segments, self._geometry.path_count)
        self._key_ids.update((header.segment, header.key_id) for header in headers)
        for path, image in enumerate(self._headers):
            mine = np.flatnonzero(paths == path)
            image.reshape(-1, ENTRY_BYTES)[rows[mine]] = packed[mine]
            if not on_disk:
                pages = rows[mine] * ENTRY_BYTES // PAD_BYTES
                self._dirty_headers.update(dict.fromkeys((path, page) for page in pages.tolist()))

    def drop_header(self, segment: int) -> None:
        """The segment has no life, as if it never had one."""
        row, path = divmod(segment, self._geometry.path_count)
        self._headers[path].reshape(-1, ENTRY_BYTES)[row] = 0
        self._key_ids.pop(segment, None)
        self._dirty_headers[path, row * ENTRY_BYTES // PAD_BYTES] = None

    def write(self, on_ended: Callable[[Batch], None]) -> Batch | None:
        """Send what is marked; None when nothing is, or while the write before is under way."""
        self._settle()
        if self._under_way is not None or not (self._dirty_pages or self._dirty_headers):
            return None
        headers = _take(self._dirty_headers, WRITE_PAGES_MAX)
        pages = sorted(_take(self._dirty_pages, WRITE_PAGES_MAX - len(headers)))
        runs = _runs(pages, self._geometry.row_count_max // PAGE_ROWS)
        buffer = aligned_buffer((len(pages) + len(headers)) * PAD_BYTES)
        accesses: list[list[Access]] = [[] for _ in self._drivers]
        at = 0
        for member, run in enumerate(runs):
            view = buffer[at : at + len(run) * PAD_BYTES]
            np.copyto(view, self._table_pages(run))
            path, offset = self._table_place(run.start)
            accesses[path].append(Access(member, offset, (view,)))
            at += len(view)
        for member, (path, page) in enumerate(headers, start=len(runs)):
            first = page * PAD_BYTES
            view = buffer[at : at + PAD_BYTES]
            np.copyto(view, self._headers[path][first : first + PAD_BYTES])
            accesses[path].append(Access(member, HEADERS_FIRST + first, (view,)))
            at += PAD_BYTES
        stage = None if self._sealer is None else self._sealer.stage_pages(self._sealed(runs))
        batch = Batch(len(runs) + len(headers), stage=stage, on_ended=on_ended)
        self._under_way = (batch, runs, headers)
        self.written_bytes += len(buffer)
        for driver, own in zip(self._drivers, accesses, strict=True):
            driver.write(own, batch)
        return batch

    def close(self) -> None:
        self.table.close()

    def _settle(self) -> None:
        """Mark again what the write before did not bring to the disk."""
        if self._under_way is None or not self._under_way[0].is_returned:
            return
        batch, runs, headers = self._under_way
        self._under_way = None
        outcomes = batch.outcomes
        for run, outcome in zip(runs, outcomes, strict=False):
            if outcome is not Outcome.DONE:
                self._dirty_pages.update(dict.fromkeys(run))
        self._dirty_headers.update(
            dict.fromkeys(
                page
                for page, outcome in zip(headers, outcomes[len(runs) :], strict=True)
                if outcome is not Outcome.DONE
            )
        )

    def _sealed(self, runs: Sequence[range]) -> dict[int, tuple[int, int]]:
        """Of the runs to be sealed, each in one segment: (key id, first slot)."""
        found: dict[int, tuple[int, int]] = {}
        for member, run in enumerate(runs):
            first = run.start * PAGE_ROWS
            key_id = self._key_ids.get(first // self._geometry.row_count_max, 0)
            if key_id:
                found[member] = (key_id, first)
        return found

    def _table_pages(self, run: range) -> Bytes:
        entries = self.table.entries(run.start * PAGE_ROWS, len(run) * PAGE_ROWS)
        pages: Bytes = entries.view(np.uint8)
        return pages

    def _table_place(self, page: int) -> tuple[int, int]:
        """(path, offset) of a page of the table."""
        geometry = self._geometry
        segment, page_in_segment = divmod(page, geometry.row_count_max // PAGE_ROWS)
        local, path = divmod(segment, geometry.path_count)
        first = geometry.table_first + local * geometry.table_segment_bytes
        return path, first + page_in_segment * PAD_BYTES


def _runs(pages: Sequence[int], segment_pages: int) -> list[range]:
    """Ascending pages that lie side by side on the disk, which ends with each segment."""
    runs: list[range] = []
    for page in pages:
        if runs and page == runs[-1].stop and page % segment_pages:
            runs[-1] = range(runs[-1].start, page + 1)
        else:
            runs.append(range(page, page + 1))
    return runs


def _take(marked: dict[_Page, None], count: int) -> list[_Page]:
    """Remove and return up to `count`, oldest first."""
    taken = [one for one, _ in zip(marked, range(count), strict=False)]
    for one in taken:
        del marked[one]
    return taken
