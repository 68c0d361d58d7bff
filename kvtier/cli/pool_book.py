"""The book of segments for a tool that fills an NVMe pool itself, with no daemon around it."""

from __future__ import annotations

from kvtier.core.segments import Reserved, SegmentBook
from kvtier.layout import SlotLayout
from kvtier.pools.nvme import NvmePool


def book_of(pool: NvmePool) -> SegmentBook:
    """An empty book as large as the pool."""
    geometry = pool.geometry
    return SegmentBook(
        segment_bytes=geometry.segment_bytes,
        segment_count=geometry.segment_count * geometry.path_count,
        row_count_max=geometry.row_count_max,
        lane_count=geometry.path_count,
        sequence_first=pool.sequence_first,
        key_id=pool.key_id,
    )


def reserve(
    pool: NvmePool, book: SegmentBook, fingerprint: bytes, layout: SlotLayout, count: int
) -> Reserved:
    """Slots to be written, in segments that the pool knows."""
    reserved = book.reserve(fingerprint, layout, count)
    pool.bind(reserved.bound)
    return reserved
