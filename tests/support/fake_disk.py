"""A pool of the fake shell below memory: what stands in its slots, and a table that lags behind.

Bytes are *stamps*: what was last written to a slot, one value a shard. The table in memory is
written to the disk by `write_table` only, a page here and a page there; a power cut keeps any
mixture of old and new, of the table and of what was written since `sync`; where the pool is
*volatile* it keeps nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.layout import SegmentHeader
from kvtier.types import BlockHash

if TYPE_CHECKING:
    from tests.support.namespace_record import NamespaceRecord

Stamp = tuple[bytes, ...]
NOTHING: Stamp = ()
ROWS_A_PAGE = 4
SEQUENCES_A_LIFE = 1_000_000


def checksum_of(stamp: Stamp) -> int:
    return zlib.crc32(b"|".join(stamp))


@dataclass(frozen=True)
class Row:
    """An entry of the slot table in state READY."""

    fingerprint: bytes
    block: BlockHash
    parent: BlockHash | None
    checksum: int
    epoch: int
    sequence: int


@dataclass(frozen=True)
class Found:
    """What recovery tells of one namespace: the parts of BlocksRecovered."""

    fingerprint: bytes
    epoch: int
    hashes: list[BlockHash]
    parents: npt.NDArray[np.int32]
    slots: ev.Slots
    sequences: npt.NDArray[np.uint64]


@dataclass
class FakeDisk:
    """`rows` and `headers` are the table in memory, what is on the disk has `disk` in its name."""

    segment_bytes: int
    segment_count: int
    row_count_max: int
    lane_count: int = 1
    life: int = 1
    readable: bool = True
    is_volatile: bool = False
    is_direct: bool = False  # Engines may be leased its slots as they are.
    is_written_ahead: bool = (
        False  # The table, of what is written over former lives: a kill's view.
    )
    stamps: dict[int, Stamp] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    headers: dict[int, SegmentHeader] = field(default_factory=dict)
    scribbled: set[int] = field(default_factory=set)  # Their bytes are not what was written.
    written_count: int = 0
    # Blocks that have moved well, since ever.
    block_counts: dict[str, int] = field(default_factory=lambda: {"demote": 0, "promote": 0})
    _disk_rows: dict[int, Row] = field(default_factory=dict)
    _disk_headers: dict[int, SegmentHeader] = field(default_factory=dict)
    _unsynced: dict[int, Stamp] = field(default_factory=dict)  # Slot -> what stood there before.
    _used: set[int] = field(default_factory=set)  # Written in this life of their segment.

    # ------------------------------------------------------------------------------------ bytes

    def read(self, slot: int) -> Stamp:
        return self.stamps.get(slot, NOTHING)

    def write(self, slot: int, stamp: Stamp) -> None:
        self._unsynced.setdefault(slot, self.read(slot))
        self.stamps[slot] = stamp
        self.scribbled.discard(slot)
        self.written_count += 1

    def erase(self, slots: Iterable[int]) -> None:
        """Zeros and a sync, for slots that hold no block."""
        for slot in slots:
            assert slot not in self.rows, "a block was erased"
            for former in (self.stamps, self._unsynced):
                former.pop(slot, None)
            self.scribbled.discard(slot)

    def scribble(self, slot: int) -> None:
        """The disk loses what stands in the slot, and does not know it."""
        self.stamps[slot] = (b"flipped",)
        self.scribbled.add(slot)

    def blocks_of(self, record: NamespaceRecord) -> set[BlockHash]:
        """Blocks of this namespace that are not void, by the table in memory."""
        return {
            row.block
            for row in self.rows.values()
            if (row.fingerprint, row.epoch) == (record.fingerprint, record.epoch)
        }

    def right_blocks(self, record: NamespaceRecord) -> set[BlockHash]:
        """Blocks of this namespace whose bytes here are as they should be."""
        return {
            row.block
            for slot, row in self.rows.items()
            if (row.fingerprint, row.epoch) == (record.fingerprint, record.epoch)
            and self.is_right(slot, (row.block,) * record.shard_count)
        }

    def is_right(self, slot: int, stamp: Stamp) -> bool:
        """Whether reading the slot brings this, and what the table says matches."""
        return self.read(slot) == stamp and self.rows[slot].checksum == checksum_of(stamp)

    def sync(self) -> None:
        self._unsynced.clear()

    # ------------------------------------------------------------------------------------ table

    def bind(self, headers: Iterable[SegmentHeader]) -> None:
        for header in headers:
            former = self.headers.get(header.segment)
            assert former is None or former.sequence < header.sequence, "an older life came back"
            assert header.slot_count * header.layout.slot_bytes <= self.segment_bytes
            assert header.segment < self.segment_count, "a segment beyond the end of the pool"
            self.headers[header.segment] = header
            for slot in self._slots_of(header.segment):
                self.rows.pop(slot, None)
                self._used.discard(slot)
        if self.is_written_ahead:
            self.write_table()

    def begin_write(self, slot: int, fingerprint: bytes) -> None:
        """The slot is about to be written: once in the life of its segment."""
        header = self.headers[slot // self.row_count_max]
        assert header.fingerprint == fingerprint, "a slot in the segment of another namespace"
        assert slot % self.row_count_max < header.slot_count, "a slot behind the end of its segment"
        assert slot not in self._used, "a slot is written a second time"
        self._used.add(slot)

    def write_ready(self, done: ins.WriteLowerReady, fingerprint: bytes) -> None:
        named = zip(
            done.lower_slots.tolist(), done.hashes, done.parents, done.checksums, strict=True
        )
        for sequence, (slot, block, parent, checksum) in enumerate(named, start=done.sequence):
            header = self.headers[slot // self.row_count_max]
            assert header.fingerprint == fingerprint, "a block in the segment of another namespace"
            assert header.sequence < sequence, "an entry older than its segment"
            assert slot not in self.rows, "a slot holds two blocks"
            self.rows[slot] = Row(fingerprint, block, parent, int(checksum), done.epoch, sequence)

    def write_gone(self, slots: Sequence[int]) -> None:
        for slot in slots:
            assert slot in self.rows, "a slot is gone that held nothing"
            del self.rows[slot]

    def block_count(self, epochs: Mapping[bytes, int]) -> int:
        """Blocks that are not void, by the table in memory."""
        return sum(row.epoch == epochs.get(row.fingerprint) for row in self.rows.values())

    def write_table(self, keeps: Callable[[int], bool] = lambda page: True) -> None:
        """Those pages reach the disk; page -1 is that of the headers."""
        if keeps(-1):
            self._disk_headers = dict(self.headers)
        for page in range(-(-self.segment_count * self.row_count_max // ROWS_A_PAGE)):
            if keeps(page):
                for slot in range(page * ROWS_A_PAGE, (page + 1) * ROWS_A_PAGE):
                    if slot in self.rows:
                        self._disk_rows[slot] = self.rows[slot]
                    else:
                        self._disk_rows.pop(slot, None)

    # -------------------------------------------------------------------------------- power cut

    def cut_power(self, keeps: Callable[[int], bool]) -> None:
        """What is not on the disk is gone; of what was on its way, `keeps` tells what arrives."""
        if self.is_volatile:
            for part in (self.stamps, self._disk_rows, self._disk_headers, self._unsynced):
                part.clear()
            self.scribbled.clear()
        else:
            self.write_table(keeps)
        for slot, before in self._unsynced.items():
            if not keeps(slot):
                self.stamps[slot] = before
        self._unsynced.clear()
        self.rows, self.headers = dict(self._disk_rows), dict(self._disk_headers)
        self.life += 1
        self._used.clear()

    def recover(
        self, epochs: Mapping[bytes, int]
    ) -> tuple[list[tuple[SegmentHeader, npt.NDArray[np.int64]]], list[Found]]:
        """Lives and chains, as `NvmePool.recover` and `chains_of` find them."""
        newest: dict[tuple[bytes, BlockHash], int] = {}
        for slot, row in sorted(self.rows.items(), key=lambda one: one[1].sequence):
            header = self.headers.get(slot // self.row_count_max)
            if (
                header is not None
                and header.fingerprint == row.fingerprint
                and header.sequence <= row.sequence
                and epochs.get(row.fingerprint) == row.epoch
            ):
                newest[row.fingerprint, row.block] = slot
        reached: dict[bytes, list[int]] = {}
        kept: set[int] = set()
        for fingerprint in sorted({one for one, _ in newest}):
            reached[fingerprint] = self._in_order(fingerprint, newest)
            kept.update(reached[fingerprint])
        self.rows = {slot: row for slot, row in self.rows.items() if slot in kept}
        # What is written next begins behind the last row that holds a block.
        self._used = {
            slot for last in kept for slot in range(last - last % self.row_count_max, last + 1)
        }
        found = [self._found(one, slots, epochs) for one, slots in reached.items() if slots]
        return self._lives(kept), found

    @property
    def sequence_first(self) -> int:
        return self.life * SEQUENCES_A_LIFE

    # ----------------------------------------------------------------------------------- helpers

    def _slots_of(self, segment: int) -> range:
        return range(segment * self.row_count_max, (segment + 1) * self.row_count_max)

    def _in_order(
        self, fingerprint: bytes, newest: Mapping[tuple[bytes, BlockHash], int]
    ) -> list[int]:
        """Slots of the namespace's blocks whose whole prefix is there, parents first."""
        waiting = {block: slot for (one, block), slot in newest.items() if one == fingerprint}
        order: dict[BlockHash, int] = {}
        while True:  # Ends: each round takes one out, or is the last.
            ready = [
                block
                for block, slot in waiting.items()
                if (parent := self.rows[slot].parent) is None or parent in order
            ]
            if not ready:
                return list(order.values())
            for block in ready:
                order[block] = waiting.pop(block)

    def _found(self, fingerprint: bytes, slots: list[int], epochs: Mapping[bytes, int]) -> Found:
        rows = [self.rows[slot] for slot in slots]
        position = {row.block: number for number, row in enumerate(rows)}
        parents = [-1 if row.parent is None else position[row.parent] for row in rows]
        lives = [self.headers[slot // self.row_count_max].sequence for slot in slots]
        return Found(
            fingerprint,
            epochs[fingerprint],
            [row.block for row in rows],
            np.array(parents, dtype=np.int32),
            np.array(slots, dtype=np.uint32),
            np.array(lives, dtype=np.uint64),
        )

    def _lives(self, kept: set[int]) -> list[tuple[SegmentHeader, npt.NDArray[np.int64]]]:
        found = []
        for segment in sorted({slot // self.row_count_max for slot in kept}):
            first = segment * self.row_count_max
            mine = sorted(slot - first for slot in kept if slot // self.row_count_max == segment)
            found.append((self.headers[segment], np.array(mine, dtype=np.int64)))
        return found
