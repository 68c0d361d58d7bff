"""Remains: the bytes of a segment that no block lies in, but one may have lain in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.layout import SegmentHeader

Ranges = tuple[tuple[int, int], ...]
"""Bytes of a segment: (first, length) each, ascending, not touching."""


@dataclass(frozen=True, slots=True)
class Remains:
    """`void_rows` held a block and hold none any more. `life` is None where nothing of the segment
    is in use."""

    life: SegmentHeader | None
    ranges: Ranges
    void_rows: tuple[int, ...] = ()


def ranges_of(header: SegmentHeader, rows: Sequence[int], segment_bytes: int) -> Ranges:
    """The bytes of these rows, which ascend, and those behind the last slot."""
    slot_bytes = header.layout.slot_bytes
    end = header.slot_count * slot_bytes
    parts = [(row * slot_bytes, slot_bytes) for row in rows]
    if end < segment_bytes:
        parts.append((end, segment_bytes - end))
    merged: list[tuple[int, int]] = []
    for first, length in parts:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((first, length))
    return tuple(merged)
