"""Small NVMe pools over memory, and blocks whose bytes follow from their hash."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence

import numpy as np

from kvtier.io.checksum import block_checksums
from kvtier.io.driver import Driver, Outcome
from kvtier.layout import SlotLayout
from kvtier.memory import Bytes
from kvtier.pools.nvme import NvmePool
from kvtier.pools.nvme_paths import format_drivers
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


def opened(drivers: Sequence[Driver], epochs: dict[bytes, int] | None = None) -> NvmePool:
    pool = NvmePool(drivers)
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
    pool: NvmePool,
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
    pool.abort(slots[~done])
    kept = [block for block, right in zip(hashes, done.tolist(), strict=True) if right]
    pool.write_ready(slots[done], kept, [None] * len(kept), checksums[done], epoch=epoch)
    return slots[done], reserved.evicted


def promote(
    pool: NvmePool, slots: Slots, layout: SlotLayout = SMALL
) -> tuple[list[Outcome], list[list[Bytes]]]:
    blocks = [empty_views(layout) for _ in slots]
    return pool.read_blocks(slots, blocks).wait(20), blocks
