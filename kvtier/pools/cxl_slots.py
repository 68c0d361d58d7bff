"""Slots of a tier in CXL memory: segments cut from slabs, and each slot's checksum.

Segment s lies in slab s. What is here does not outlive the daemon, so there is no slot table: the
core knows which block lies where, and a checksum beside each slot says what its bytes must be.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.layout import PAD_BYTES, SegmentHeader
from kvtier.memory import Bytes
from kvtier.pools.slabs import Slab
from kvtier.pools.slot_table import Slots

Checksums = npt.NDArray[np.uint64]
_SLOT_NUMBERS = 1 << 32


class CxlSlots:
    """All methods belong to one thread; views may be used in any."""

    def __init__(self, slabs: Sequence[Slab]) -> None:
        """Slabs of one size."""
        assert slabs, "a tier without memory"
        self.segment_bytes = slabs[0].length_bytes
        assert all(slab.length_bytes == self.segment_bytes for slab in slabs)
        # No slot is smaller than its padding; and slot numbers have 32 bits.
        self.row_count_max = min(self.segment_bytes // PAD_BYTES, _SLOT_NUMBERS // len(slabs))
        self._slabs = list(slabs)
        self._lives: dict[int, SegmentHeader] = {}
        self._checksums: dict[int, Checksums] = {}  # By segment; one a slot of its present life.

    @property
    def segment_count(self) -> int:
        return len(self._slabs)

    def bind(self, headers: Sequence[SegmentHeader]) -> None:
        """These segments have a new life; what was in them is gone."""
        for header in headers:
            assert header.slot_count * header.layout.slot_bytes <= self.segment_bytes
            self._lives[header.segment] = header
            self._checksums[header.segment] = np.zeros(header.slot_count, np.uint64)

    def padded_views(self, slot: int) -> list[Bytes]:
        """One a shard, padding included, as `DramPool.padded_views` has them."""
        segment, row = divmod(slot, self.row_count_max)
        layout = self._lives[segment].layout
        first = row * layout.slot_bytes
        whole = self._slabs[segment].mapping.array[first : first + layout.slot_bytes]
        size = layout.padded_shard_bytes
        return [whole[shard * size : (shard + 1) * size] for shard in range(layout.shard_count)]

    def range_views(self, segment: int, ranges: Sequence[tuple[int, int]]) -> list[Bytes]:
        """These bytes of the segment, (first, length) each."""
        whole = self._slabs[segment].mapping.array
        return [whole[first : first + length] for first, length in ranges]

    def forget_life(self, segment: int) -> None:
        """Nothing lies in it any more."""
        self._lives.pop(segment, None)
        self._checksums.pop(segment, None)

    def write_checksums(self, slots: Slots, checksums: Checksums) -> None:
        """These slots hold blocks with these checksums."""
        for slot, checksum in zip(slots.tolist(), checksums.tolist(), strict=True):
            segment, row = divmod(slot, self.row_count_max)
            self._checksums[segment][row] = checksum

    def checksums(self, slots: Slots) -> Checksums:
        """What the bytes must be; 0 where there is no block."""
        return np.array(
            [
                self._checksums[slot // self.row_count_max][slot % self.row_count_max]
                for slot in slots.tolist()
            ],
            np.uint64,
        )

    def write_gone(self, slots: Slots) -> None:
        """These slots hold nothing, whatever their segment is by now."""
        for slot in slots.tolist():
            segment, row = divmod(slot, self.row_count_max)
            kept = self._checksums.get(segment)
            if kept is not None and row < len(kept):
                kept[row] = 0
