"""`kvtier bench recovery`: time to have a large NVMe pool in the core's index after a crash.

A pool of that many slots of 2 MiB is made in a sparse file (only its tables take room on the disk),
its table is filled with chains of blocks through the pool's own calls and written, and the file
closed as a crash would leave it. Then it is opened and recovered by what a daemon has for that: the
pool reads and judges every entry, parents are found, and a block manager takes all in.

    recovery_s         from opening the file to the last block in the index; the least of --rounds
    recovery_median_s  the median of them
    open_s, read_s     parts of the least: superblocks; headers and slot table, read and judged
    chains_s, index_s  likewise: parents found, blocks put in order; all taken into the core
    recovery_cpu_s     processor time of the least
    dict_build_s       beside it: one dict of as many hashes that are in memory already
    table_was_cold     the table was read from the disk past the page cache (direct I/O); the disk's
                       own memory, and a host's below a virtual disk, cannot be known
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from kvtier.cli import bench_run, measure
from kvtier.cli.output import say
from kvtier.cli.pool_book import book_of, reserve
from kvtier.cli.sizes import positive
from kvtier.core.events import BlocksRecovered, Event, LowerOpened, NamespaceOpened
from kvtier.core.instructions import Continue
from kvtier.core.manager import BlockManager
from kvtier.core.settings import ManagerConfig
from kvtier.errors import KVTierError
from kvtier.io.file import FileDriver
from kvtier.layout import SEGMENT_BYTES, SlotLayout
from kvtier.policy.lru import LruPolicy
from kvtier.pools.chains import RecoveredChains, chains_of
from kvtier.pools.nvme import NvmePool
from kvtier.pools.nvme_paths import format_paths
from kvtier.pools.nvme_recovery import RecoveredBlocks
from kvtier.pools.superblock import ROW_COUNT_MAX
from kvtier.types import BlockHash, NamespaceId, PackedHashes

PARTS = ("open_s", "read_s", "chains_s", "index_s")
TARGETS = {"recovery_s": measure.Target(at_most=2.0)}
BLOCK_BYTES = 2 << 20
HASH_BYTES = 32
_FINGERPRINT = b"bench-recovery--"
_EPOCH = 1
_STEP = 4096
_CHAINS = 8  # In each step, taking turns.
_RUN_BLOCKS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=positive, default=1_000_000, help="(1000000)")
    parser.add_argument("--rounds", type=positive, default=5, help="(5)")
    parser.add_argument(
        "--path",
        type=Path,
        metavar="DIR",
        default=Path(tempfile.gettempdir()),
        help="directory of the disk to measure (the one for temporary files)",
    )


def run(arguments: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=arguments.path))
    try:
        figures = _measure(folder / "pool", arguments.slots, arguments.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return bench_run.report(arguments, figures, TARGETS)


def _measure(path: Path, slot_count: int, round_count: int) -> dict[str, object]:
    segment_count = -(-slot_count * BLOCK_BYTES // SEGMENT_BYTES)
    table_bytes = (segment_count + 1) * ROW_COUNT_MAX * 132
    format_paths(
        [path],
        (segment_count + 1) * SEGMENT_BYTES + table_bytes,
        pool_id=os.urandom(16),
        generation=int.from_bytes(os.urandom(8), sys.byteorder),
        preallocate=False,
    )
    say(f"filling a table of {slot_count} slots")
    _fill(path, slot_count)
    rounds = [_recover(path, slot_count) for _ in range(round_count)]
    best = min(rounds, key=lambda one: one.seconds)
    return {
        "recovery_s": best.seconds,
        "recovery_median_s": measure.percentile([one.seconds for one in rounds], 50),
        **best.parts,
        "recovery_cpu_s": best.cpu_seconds,
        "dict_build_s": min(one.dict_seconds for one in rounds),
        "table_was_cold": best.was_cold,
        "slots": slot_count,
        "segments": segment_count,
        "table_mib": slot_count * 128 / 2**20,
        "rounds": round_count,
    }


def _fill(path: Path, slot_count: int) -> None:
    """Blocks without payloads: recovery reads none."""
    layout = SlotLayout(BLOCK_BYTES, 1)
    pool = NvmePool([FileDriver(path)])
    pool.recover({})
    book = book_of(pool)
    for first in range(0, slot_count, _STEP):
        count = min(_STEP, slot_count - first)
        slots = reserve(pool, book, _FINGERPRINT, layout, count).slots
        hashes, parents = _written_blocks(count)
        checksums = np.arange(first + 1, first + count + 1, dtype=np.uint64)
        sequence = book.take_sequences(count)
        pool.write_ready(slots, hashes, parents, checksums, epoch=_EPOCH, sequence=sequence)
        book.commit(slots)
    while (batch := pool.write_table()) is not None:
        batch.wait()
        batch.wait_returned()
    pool.close(clean=False)


def _written_blocks(count: int) -> tuple[list[BlockHash], list[BlockHash | None]]:
    """(hashes, parents' hashes) as several engines at once write them: a run of blocks of one
    chain, then of the next one, until all are through."""
    raw = os.urandom(HASH_BYTES * count)
    hashes = [BlockHash(raw[at : at + HASH_BYTES]) for at in range(0, len(raw), HASH_BYTES)]
    written: list[tuple[BlockHash, BlockHash | None]] = []
    chain_blocks = -(-count // _CHAINS)
    for begin in range(0, chain_blocks, _RUN_BLOCKS):
        for first in range(0, count, chain_blocks):
            end = min(begin + _RUN_BLOCKS, chain_blocks, count - first)
            written += [
                (hashes[first + at], hashes[first + at - 1] if at else None)
                for at in range(begin, end)
            ]
    return [block for block, _ in written], [parent for _, parent in written]


@dataclass(frozen=True, slots=True)
class _Round:
    """How long each part took."""

    parts: dict[str, float]
    cpu_seconds: float
    dict_seconds: float
    was_cold: bool

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def _recover(path: Path, slot_count: int) -> _Round:
    gc.collect()
    cpu_started = time.process_time()
    instants = [time.perf_counter()]
    driver = FileDriver(path)
    pool = NvmePool([driver])
    instants.append(time.perf_counter())
    found = pool.recover({_FINGERPRINT: _EPOCH})
    instants.append(time.perf_counter())
    [chains] = chains_of(found)
    instants.append(time.perf_counter())
    block_count = _take_in(pool, found, chains)
    instants.append(time.perf_counter())
    cpu_seconds = time.process_time() - cpu_started
    was_cold = driver.is_direct
    pool.close(clean=False)
    if block_count != slot_count:
        raise KVTierError(f"{block_count} of {slot_count} blocks were recovered")
    del found
    dict_seconds = _dict_seconds(chains)
    seconds = [after - before for before, after in pairwise(instants)]
    say(f"recovered in {sum(seconds):.2f} s; a dict of the hashes takes {dict_seconds:.2f} s")
    return _Round(dict(zip(PARTS, seconds, strict=True)), cpu_seconds, dict_seconds, was_cold)


def _take_in(pool: NvmePool, found: RecoveredBlocks, chains: RecoveredChains) -> int:
    """How many blocks a new block manager knows then."""
    manager = BlockManager(
        ManagerConfig(slab_bytes=1 << 30, slab_count_max=1), make_policy=LruPolicy
    )
    namespace, geometry = NamespaceId(1), pool.geometry
    manager.handle(
        NamespaceOpened(
            namespace,
            _EPOCH,
            HASH_BYTES,
            BLOCK_BYTES,
            1,
            shard_bytes=BLOCK_BYTES,
            fingerprint=_FINGERPRINT,
        ),
        0.0,
    )
    opened = LowerOpened(
        segment_bytes=geometry.segment_bytes,
        segment_count=geometry.segment_count * geometry.path_count,
        row_count_max=geometry.row_count_max,
        lane_count=geometry.path_count,
        sequence_first=pool.sequence_first,
        lives=found.lives,
    )
    recovered = BlocksRecovered(
        namespace=namespace,
        epoch=chains.epoch,
        packed=chains.packed,
        parents=chains.parents,
        lower_slots=chains.lower_slots,
        sequences=chains.sequences,
        used_at=chains.used_at,
    )
    following: list[Event] = [opened, recovered]
    while following:  # Slices, as in the daemon: until the last one has been taken in.
        done = manager.handle(following.pop(0), 0.0)
        following += [one.event for one in done if isinstance(one, Continue)]
    return manager.stats().namespaces[0].block_count


def _dict_seconds(chains: RecoveredChains) -> float:
    """What the index would cost if a dict were all of it."""
    hashes = PackedHashes(chains.packed, HASH_BYTES)[:]
    started = time.perf_counter()
    built = dict(zip(hashes, range(len(hashes)), strict=True))
    seconds = time.perf_counter() - started
    assert len(built) == len(hashes)
    return seconds
