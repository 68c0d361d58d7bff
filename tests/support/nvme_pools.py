"""Small NVMe pools over memory, and blocks whose bytes follow from their hash.

A `BookedPool` is a pool with a book of its segments: what the core and the shell are to a daemon.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Mapping, Sequence

import numpy as np

from kvtier.cli.pool_book import book_of
from kvtier.core.segments import Reserved
from kvtier.io.checksum import Checksums, block_checksums
from kvtier.io.driver import Driver, Outcome
from kvtier.layout import SlotLayout
from kvtier.memory import Bytes
from kvtier.pools.nvme import NvmePool, PoolState
from kvtier.pools.nvme_paths import format_drivers
from kvtier.pools.nvme_recovery import RecoveredBlocks
from kvtier.pools.slot_table import Slots
from kvtier.types import BlockHash
from tests.support.crashing_file import CrashingDriver, CrashingFile

GENERATION = 0x0102030405060708
POOL_ID = b"p" * 16
SEGMENT_BYTES = 64 << 10
ROW_COUNT_MAX = 32
LENGTH_BYTES = 1 << 20
EPOCH = 9
# Neither is a multiple of the padding; 16 and 5 slots a segment.
SMALL = SlotLayout(shard_bytes=4_000, shard_count=1)
LARGE = SlotLayout(shard_bytes=5_000, shard_count=1)
SHARDED = SlotLayout(shard_bytes=4_097, shard_count=2)


def make_drivers(path_count: int = 1, length_bytes: int = LENGTH_BYTES) -> list[CrashingDriver]:
    """Formatted, and durable."""
    drivers = [
        CrashingDriver(CrashingFile(length_bytes), f"path{number}") for number in range(path_count)
    ]
    format_drivers(
        drivers,
        length_bytes,
        pool_id=POOL_ID,
        generation=GENERATION,
        segment_bytes=SEGMENT_BYTES,
        row_count_max=ROW_COUNT_MAX,
    )
    return drivers


class BookedPool(NvmePool):
    """Whoever uses it decides; the book says which slots that takes."""

    def recover(self, epochs: Mapping[bytes, int] | None) -> RecoveredBlocks:
        found = super().recover(epochs)
        self.book = book_of(self)
        self.book.adopt(found.lives)
        return found

    def reserve(self, fingerprint: bytes, layout: SlotLayout, count: int) -> Reserved:
        """None unless the pool is ON."""
        is_on = self.condition.state is PoolState.ON
        reserved = self.book.reserve(fingerprint, layout, count if is_on else 0)
        self.bind(reserved.bound)
        return reserved

    def commit(
        self,
        slots: Slots,
        hashes: Sequence[BlockHash],
        checksums: Checksums,
        *,
        epoch: int,
    ) -> None:
        """These reserved slots hold these blocks, each the first of a prefix."""
        sequence = self.book.take_sequences(len(slots))
        self.book.commit(slots)
        parents = [None] * len(slots)
        self.write_ready(slots, hashes, parents, checksums, epoch=epoch, sequence=sequence)

    def void(self, slots: Slots) -> None:
        """These blocks are gone."""
        self.book.void(slots)
        self.write_gone(slots)


def opened(drivers: Sequence[Driver], epochs: dict[bytes, int] | None = None) -> BookedPool:
    pool = BookedPool(drivers)
    pool.recover(epochs)
    return pool


def fingerprint_of(name: str) -> bytes:
    return hashlib.md5(name.encode(), usedforsecurity=False).digest()


def hash_of(name: str) -> BlockHash:
    return BlockHash(hashlib.sha256(name.encode()).digest())


def payload_of(block: BlockHash, layout: SlotLayout) -> list[Bytes]:
    """The right bytes of each shard."""
    seed = int.from_bytes(block[:8], "little")
    chance = np.random.default_rng(seed)
    return [
        chance.integers(0, 256, layout.shard_bytes, np.uint8) for _ in range(layout.shard_count)
    ]


def empty_views(layout: SlotLayout) -> list[Bytes]:
    """Views for one block, padding included, at page-aligned addresses."""
    array = np.frombuffer(mmap.mmap(-1, layout.slot_bytes), np.uint8)
    return list(array.reshape(layout.shard_count, layout.padded_shard_bytes))


def filled_views(block: BlockHash, layout: SlotLayout) -> list[Bytes]:
    views = empty_views(layout)
    for view, payload in zip(views, payload_of(block, layout), strict=True):
        view[: len(payload)] = payload
    return views


def is_right(views: Sequence[Bytes], block: BlockHash, layout: SlotLayout) -> bool:
    return all(
        bool((view[: layout.shard_bytes] == payload).all())
        for view, payload in zip(views, payload_of(block, layout), strict=True)
    )


def checksums_of(blocks: Sequence[Sequence[Bytes]], layout: SlotLayout) -> np.ndarray:
    return block_checksums([[view[: layout.shard_bytes] for view in block] for block in blocks])


def demote(
    pool: BookedPool,
    names: Sequence[str],
    *,
    namespace: str = "ns",
    layout: SlotLayout = SMALL,
    epoch: int = EPOCH,
) -> tuple[Slots, Slots]:
    """Reserve, write and commit these blocks; (their slots, slots evicted for them)."""
    reserved = pool.reserve(fingerprint_of(namespace), layout, len(names))
    slots = reserved.slots
    hashes = [hash_of(name) for name in names[: len(slots)]]
    blocks = [filled_views(block, layout) for block in hashes]
    checksums = checksums_of(blocks, layout)
    outcomes = pool.write_blocks(slots, blocks, checksums).wait(20)
    done = np.array([outcome is Outcome.DONE for outcome in outcomes], np.bool_)
    pool.book.abort(slots[~done])
    kept = [block for block, right in zip(hashes, done.tolist(), strict=True) if right]
    pool.commit(slots[done], kept, checksums[done], epoch=epoch)
    return slots[done], reserved.evicted


def promote(
    pool: NvmePool, slots: Slots, layout: SlotLayout = SMALL
) -> tuple[list[Outcome], list[list[Bytes]]]:
    blocks = [empty_views(layout) for _ in slots]
    return pool.read_blocks(slots, blocks).wait(20), blocks
