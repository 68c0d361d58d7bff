"""NVMe pool: one preallocated file or device per path, in segments, with its slot table inside.

The pool knows where slots lie and what its table says of them; which slot a block gets, when a
segment is reused and what is pinned is decided elsewhere. The life of one slot: its segment is
bound, `write_blocks`, then `write_ready`; much later `write_gone`, or the segment is bound anew.
Whoever decides must not bind a segment anew before every batch in it has *returned*, which may be
long after the wait for it ended.

Nothing is fsynced but the superblock, at open and close. What the disk then says after a crash may
be old, new or torn in any mixture; `recover` believes what `nvme_recovery.py` says, and every read
compares the payload with the checksum in the entry. A checksum that differs is a miss: CORRUPT.

With keys, payloads and entries are sealed (`sealing.py`); what was written without, or with a key
that is not given any more, does not count.

All methods belong to one thread, views may be used in any. A disk that fails is a value,
`PoolCondition`: after an error it is only read, once it is gone it is not used at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import ConfigError
from kvtier.io.alignment import aligned_buffer
from kvtier.io.checksum import Checksums, block_checksum
from kvtier.io.driver import Access, Batch, Check, Driver, Outcome, Stage
from kvtier.io.zero import write_zeros
from kvtier.layout import PAD_BYTES, SegmentHeader, SlotLayout
from kvtier.memory import Bytes
from kvtier.pools import nvme_recovery
from kvtier.pools.nvme_paths import sorted_paths, write_superblock
from kvtier.pools.nvme_recovery import RecoveredBlocks
from kvtier.pools.nvme_table import TableImage
from kvtier.pools.slot_table import BlockFacts, Slots
from kvtier.pools.superblock import LIFE_MAX
from kvtier.types import BlockHash

if TYPE_CHECKING:  # It needs cryptography, which only those who encrypt have.
    from kvtier.pools.sealing import SealedBlocks, Sealer

MakeSealer = Callable[[int], "Sealer"]
"""By the generation of the pool."""

Block = Sequence[Bytes]
"""The views of one block's shards, each as long as a padded shard."""

Ended = Callable[[Batch], None]
CLOSE_SECONDS = 10.0
_RECENCY_STEP = 1 << 18


class PoolState(StrEnum):
    """What a pool may be asked for."""

    ON = "on"
    READ_ONLY = "read_only"  # Nothing is written any more, the table neither.
    OFF = "off"


@dataclass(frozen=True, slots=True)
class PoolCondition:
    """`reason` is for people; empty while the pool is ON."""

    state: PoolState
    reason: str


_ON = PoolCondition(PoolState.ON, "")
_RANK = {PoolState.ON: 0, PoolState.READ_ONLY: 1, PoolState.OFF: 2}
_TELLING = {
    Outcome.EIO: PoolState.READ_ONLY,
    Outcome.NO_SPACE: PoolState.READ_ONLY,
    Outcome.GONE: PoolState.OFF,
}


class NvmePool:
    """Over one driver per path, in any order. Owns the drivers, even those that it refuses."""

    def __init__(
        self,
        drivers: Sequence[Driver],
        *,
        writable: bool = True,
        make_sealer: MakeSealer | None = None,
        on_condition: Callable[[PoolCondition], None] = lambda _: None,
    ) -> None:
        """Raises ConfigError when the paths are not exactly those of one formatted pool.

        `on_condition` is called at each change for the worse, from whichever thread saw it.
        """
        try:
            self._drivers, self._superblocks = sorted_paths(drivers)
        except ConfigError:
            for driver in drivers:
                driver.close()
            raise
        first = self._superblocks[0]
        self.geometry = first.geometry
        self.generation = first.generation
        self.was_clean = all(one.is_clean for one in self._superblocks)
        self._on_condition = on_condition
        self._condition = _ON if writable else PoolCondition(PoolState.READ_ONLY, "opened to read")
        self._condition_lock = threading.Lock()
        life = max(one.life for one in self._superblocks) + 1
        assert life <= LIFE_MAX, f"{self._drivers[0].name} was opened {life} times: format it"
        recency = (first.recency_count, first.recency_checksum)
        self._recency_facts = recency if self.was_clean else None
        if writable:
            self._write_superblocks(is_clean=False, life=life, recency=(0, 0))
        self._sealer = make_sealer(self.generation) if make_sealer is not None else None
        self._image = TableImage(self._drivers, self.geometry, self.generation, self._sealer)
        self.locked_count = 0  # Segments that do not count, for want of a seal or of its key.
        # The present life of each segment that has one; the last one of a segment that fell free.
        self._lives: dict[int, SegmentHeader] = {}
        self._used: set[int] = set()  # Segments that may have bytes of somebody.

    @property
    def condition(self) -> PoolCondition:
        return self._condition

    @property
    def key_id(self) -> int:
        """Of the key that new segments are sealed with; 0: they are not."""
        return 0 if self._sealer is None else self._sealer.key_id

    @property
    def sequence_first(self) -> int:
        """No number from here on was given in a former life of the pool."""
        return self._superblocks[0].sequence_first

    @property
    def dirty_page_count(self) -> int:
        """Pages of the table that are newer in memory than on the disk."""
        return self._image.dirty_count

    @property
    def table_written_bytes(self) -> int:
        """What `write_table` has sent to the disk since the pool was opened."""
        return self._image.written_bytes

    def recover(self, epochs: Mapping[bytes, int] | None) -> RecoveredBlocks:
        """Read what the pool holds; once, before anything else. `epochs`: by fingerprint, the
        current epoch of every namespace; None takes all, which is for tools.

        Raises TableUnreadable. Where only a part of the table cannot be read, the blocks in it are
        lost, and the pool is READ_ONLY: what is on the disk stays as it is.
        """
        written = nvme_recovery.read_headers(self._drivers, self.geometry, self.generation)
        headers = [header for header in written if self._opens(header)]
        self._used.update(header.segment for header in written)
        self.locked_count = len(written) - len(headers)
        self._lives = {header.segment: header for header in headers}
        self._image.put_headers(headers, on_disk=True)
        found = nvme_recovery.read_blocks(
            self._drivers, self.geometry, headers, epochs, self._image.table, self._sealer
        )
        self._image.mark(found.void_slots)
        if found.unread_count:
            reason = f"the slot table of {found.unread_count} segments cannot be read"
            self.fail(PoolCondition(PoolState.READ_ONLY, reason))
        recency = self._read_recency()
        if recency is None:
            return found
        return replace(found, recency=recency[np.isin(recency, found.slots)])

    def header_of(self, slot: int) -> SegmentHeader:
        """The present life of the slot's segment; AssertionError when it has none."""
        header = self._lives.get(int(slot) // self.geometry.row_count_max)
        assert header is not None, f"slot {slot} is in no bound segment"
        return header

    def bind(self, headers: Sequence[SegmentHeader]) -> None:
        """New lives of segments begin: what stood in their rows is gone."""
        for header in headers:
            before = self._lives.get(header.segment)
            if before is not None:
                assert before.sequence < header.sequence, "a new life has a higher number"
                self._image.empty(header.segment, before.slot_count)
            self._lives[header.segment] = header
            self._used.add(header.segment)
        self._image.put_headers(headers)

    def checksums(self, slots: Slots) -> Checksums:
        """Of the payloads, as the table has them; 0 for a slot without a block."""
        return self._image.table.checksums(slots)

    def write_blocks(
        self,
        slots: Slots,
        blocks: Sequence[Block],
        checksums: Checksums,
        *,
        on_ended: Ended | None = None,
        on_returned: Ended | None = None,
    ) -> Batch:
        """Write payloads into slots of bound segments; a block that does not match its checksum any
        more is CORRUPT and not written. Where they go is settled when this returns."""
        assert len(slots) == len(blocks) == len(checksums), "one block and one checksum a slot"
        layout = self._layout_of(slots)
        check = partial(_matches, blocks, checksums, layout)
        batch = self._batch(slots, check, self._stage_of(slots), on_ended, on_returned)
        if self._condition.state is not PoolState.ON:
            _refuse(batch)
            return batch
        for driver, accesses in self._accesses(slots, blocks, layout):
            driver.write(accesses, batch)
        return batch

    def read_blocks(
        self,
        slots: Slots,
        blocks: Sequence[Block],
        *,
        on_ended: Ended | None = None,
        on_returned: Ended | None = None,
    ) -> Batch:
        """Read payloads of slots that hold blocks and compare them with their checksums."""
        checksums = self.checksums(slots)
        assert len(slots) == len(blocks), "one block a slot"
        layout = self._layout_of(slots)
        stage = self._stage_of(slots)

        def check(member: int) -> bool:
            is_open = stage is None or stage.open(member, blocks[member])
            return is_open and _matches(blocks, checksums, layout, member)

        batch = self._batch(slots, check, stage, on_ended, on_returned)
        if self._condition.state is PoolState.OFF:
            _refuse(batch)
            return batch
        for driver, accesses in self._accesses(slots, blocks, layout):
            driver.read(accesses, batch)
        return batch

    def write_ready(
        self,
        slots: Slots,
        hashes: Sequence[BlockHash],
        parents: Sequence[BlockHash | None],
        checksums: Checksums,
        *,
        epoch: int,
        sequence: int,
    ) -> None:
        """Table: these slots, whose writes are DONE, hold these blocks of one namespace; sequence
        numbers ascend from `sequence`."""
        if len(slots) == 0:
            return
        headers = self._headers_of(slots)
        first = headers[0]
        for header in headers:
            assert header.fingerprint == first.fingerprint, "blocks of two namespaces"
            assert header.sequence < sequence, "numbers ascend: such an entry would be void"
        facts = BlockFacts(first.fingerprint, epoch, first.layout.payload_bytes)
        self._image.table.write_ready(
            slots, hashes, parents, facts, sequence=sequence, checksums=checksums
        )
        self._image.mark(slots)

    def write_gone(self, slots: Slots) -> None:
        """Table: these slots hold nothing."""
        self._image.table.write_gone(slots)
        self._image.mark(slots)

    def was_used(self, segment: int) -> bool:
        """Whether it has had a life since the pool was formatted, or `forget_life`."""
        return segment in self._used

    def zero(self, segment: int, ranges: Sequence[tuple[int, int]]) -> Outcome:
        """Nothing of these bytes of the segment, (first, length) each, is left; durable when this
        returns DONE. Blocks; may be called in any thread. Whoever calls it has them to himself."""
        local, path = divmod(segment, len(self._drivers))
        first = self.geometry.segments_first + local * self.geometry.segment_bytes
        driver = self._drivers[path]
        for start, length in ranges:
            if self._condition.state is not PoolState.ON:
                return Outcome.REFUSED
            if not driver.punch(first + start, length):
                outcome = write_zeros(driver, first + start, length)
                if outcome is not Outcome.DONE:
                    return outcome
        return driver.sync()

    def forget_life(self, segment: int) -> None:
        """Its bytes are zeros: so are its header and its entries from now on."""
        before = self._lives.pop(segment, None)
        if before is None:  # Entries that were not taken for any: what the disk has goes.
            first = segment * self.geometry.row_count_max
            self._image.mark(np.arange(first, first + self.geometry.row_count_max, dtype=np.uint32))
        else:
            self._image.empty(segment, before.slot_count)
        self._image.drop_header(segment)
        self._used.discard(segment)

    def write_table(self) -> Batch | None:
        """Send the changes of the table to the disk; called on a timer. None: nothing to do now."""
        if self._condition.state is not PoolState.ON:
            return None
        return self._image.write(self._note)

    def close(
        self, *, clean: bool, recency: Slots | None = None, timeout_seconds: float = CLOSE_SECONDS
    ) -> bool:
        """Give the files back. `clean`: with the whole table on the disk, synced, and the order of
        use (least recent first). False when that failed or a call still hangs.
        """
        closed = self._close_clean(recency, timeout_seconds) if clean else True
        for driver in self._drivers:
            closed &= driver.close(timeout_seconds)
        self._image.close()
        return closed

    # --------------------------------------------------------------------------------- accesses

    def _headers_of(self, slots: Slots) -> list[SegmentHeader]:
        """The lives that these slots belong to, each once."""
        row_count_max = self.geometry.row_count_max
        segments = np.unique(slots // row_count_max)
        return [self.header_of(segment * row_count_max) for segment in segments.tolist()]

    def _layout_of(self, slots: Slots) -> SlotLayout:
        layouts = {header.layout for header in self._headers_of(slots)} or {SlotLayout(1, 1)}
        assert len(layouts) == 1, "slots of one layout in one batch"
        return layouts.pop()

    def _opens(self, header: SegmentHeader) -> bool:
        """Whether what the segment holds may count: anybody could write blocks without a seal."""
        if self._sealer is None:
            return header.key_id == 0
        return self._sealer.knows(header.key_id)

    def _stage_of(self, slots: Slots) -> SealedBlocks | None:
        """How payloads are sealed on their way to these slots, and opened from there."""
        if self._sealer is None:
            return None
        return self._sealer.stage([(self.header_of(slot), slot) for slot in slots.tolist()])

    def _batch(
        self,
        slots: Slots,
        check: Check,
        stage: Stage | None,
        on_ended: Ended | None,
        on_returned: Ended | None,
    ) -> Batch:
        def ended(batch: Batch) -> None:
            self._note(batch)
            if on_ended is not None:
                on_ended(batch)

        return Batch(len(slots), check=check, stage=stage, on_ended=ended, on_returned=on_returned)

    def _accesses(
        self, slots: Slots, blocks: Sequence[Block], layout: SlotLayout
    ) -> list[tuple[Driver, list[Access]]]:
        """What goes to each path."""
        found: list[tuple[Driver, list[Access]]] = [(driver, []) for driver in self._drivers]
        # Worked out once: this runs on the event loop.
        segments_first, segment_bytes = self.geometry.segments_first, self.geometry.segment_bytes
        row_count_max, slot_bytes = self.geometry.row_count_max, layout.slot_bytes
        lengths = [layout.padded_shard_bytes] * layout.shard_count
        seals = (aligned_buffer(layout.seals_bytes),) if layout.is_sealed else ()
        for member, (slot, block) in enumerate(zip(slots.tolist(), blocks, strict=True)):
            assert list(map(len, block)) == lengths, "a view for each shard, padding included"
            segment, row = divmod(slot, row_count_max)
            local, path = divmod(segment, len(self._drivers))
            offset = segments_first + local * segment_bytes + row * slot_bytes
            found[path][1].append(Access(member, offset, (*block, *seals)))
        return [(driver, accesses) for driver, accesses in found if accesses]

    def _note(self, batch: Batch) -> None:
        """What a batch tells of the disk's health."""
        for outcome in set(batch.outcomes) & set(_TELLING):
            self.fail(PoolCondition(_TELLING[outcome], f"the disk answered {outcome.name}"))

    def fail(self, condition: PoolCondition) -> None:
        """Things have become worse; they never become better in this life of the daemon."""
        with self._condition_lock:
            if _RANK[condition.state] <= _RANK[self._condition.state]:
                return
            self._condition = condition
        self._on_condition(condition)

    # ------------------------------------------------------------------------- opening, closing

    def _close_clean(self, recency: Slots | None, timeout_seconds: float) -> bool:
        while (batch := self.write_table()) is not None:
            outcomes = batch.wait(timeout_seconds)
            if not batch.is_returned or Outcome.DONE not in outcomes:
                return False  # Pages that the disk does not take are left, or this had no end.
        facts = (0, 0) if recency is None else self._write_recency(recency, timeout_seconds)
        if self._image.dirty_count or facts is None or self._condition.state is not PoolState.ON:
            return False
        synced = [driver.sync() for driver in self._drivers]
        if any(outcome is not Outcome.DONE for outcome in synced):
            return False
        return self._write_superblocks(is_clean=True, life=None, recency=facts)

    def _write_superblocks(
        self, *, is_clean: bool, life: int | None, recency: tuple[int, int]
    ) -> bool:
        """Both copies of each path, one after the other, synced; False when a disk refused."""
        changed = [
            one.next_revision(
                is_clean=is_clean,
                life=one.life if life is None else life,
                recency_count=recency[0],
                recency_checksum=recency[1],
            )
            for one in self._superblocks
        ]
        self._superblocks = changed
        outcomes = {
            write_superblock(driver, one)
            for driver, one in zip(self._drivers, changed, strict=True)
        }
        for outcome in outcomes - {Outcome.DONE}:
            state = _TELLING.get(outcome, PoolState.READ_ONLY)
            self.fail(PoolCondition(state, f"the superblock could not be written: {outcome.name}"))
        return outcomes == {Outcome.DONE}

    def _write_recency(self, recency: Slots, timeout_seconds: float) -> tuple[int, int] | None:
        """To the first path; (count, checksum)."""
        count = min(len(recency), self.geometry.recency_count_max)
        padded = aligned_buffer(-(-count * 4 // PAD_BYTES) * PAD_BYTES)
        np.copyto(padded[: count * 4].view("<u4"), recency[:count])
        first = self.geometry.recency_first
        starts = range(0, len(padded), _RECENCY_STEP * 4)
        batch = Batch(len(starts))
        views = [padded[start : start + _RECENCY_STEP * 4] for start in starts]
        self._drivers[0].write(
            [
                Access(member, first + start, (view,))
                for member, (start, view) in enumerate(zip(starts, views, strict=True))
            ],
            batch,
        )
        done = all(outcome is Outcome.DONE for outcome in batch.wait(timeout_seconds))
        checksum = xxhash.xxh3_64_intdigest(padded[: count * 4].data)
        return (count, checksum) if done else None

    def _read_recency(self) -> npt.NDArray[np.uint32] | None:
        if self._recency_facts is None:
            return None
        count, checksum = self._recency_facts
        if not 0 < count <= self.geometry.recency_count_max:
            return None
        length_bytes = -(-count * 4 // PAD_BYTES) * PAD_BYTES
        first = self.geometry.recency_first
        try:
            raw = nvme_recovery.read_area(self._drivers[0], first, length_bytes)
        except nvme_recovery.TableUnreadable:
            return None  # Worth an order, not the blocks.
        found: npt.NDArray[np.uint32] = raw[: count * 4].view("<u4")
        actual: int = xxhash.xxh3_64_intdigest(found.data)
        return found if actual == checksum else None


def _matches(
    blocks: Sequence[Block], checksums: Checksums, layout: SlotLayout, member: int
) -> bool:
    """Whether a block is what its checksum says."""
    payload = [shard[: layout.shard_bytes] for shard in blocks[member]]
    return bool(block_checksum(payload) == checksums[member])


def _refuse(batch: Batch) -> None:
    for member in range(batch.count):
        batch.finish(member, Outcome.REFUSED)
