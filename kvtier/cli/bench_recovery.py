"""`kvtier bench recovery`: time to read the slot table of a large NVMe pool after a crash.

A pool of that many slots of 2 MiB is made in a sparse file (only its tables take room on the disk),
its table is filled with blocks through the pool's own calls and written, and the file closed as a
crash would leave it. Then it is opened and recovered, as a daemon would.

    recovery_s       from opening the file to arrays of every block; the least of --rounds
    recovery_cpu_s   processor time of that
    dict_build_s     beside it: one dict of as many hashes that are in memory already
    table_was_cold   the table was read from the disk past the page cache (direct I/O); the disk's
                     own memory, and a host's below a virtual disk, cannot be known
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvtier.cli import bench_run, measure
from kvtier.cli.output import say
from kvtier.cli.pool_book import book_of, reserve
from kvtier.cli.sizes import positive
from kvtier.errors import KVTierError
from kvtier.io.file import FileDriver
from kvtier.layout import SEGMENT_BYTES, SlotLayout
from kvtier.pools.nvme import NvmePool
from kvtier.pools.nvme_paths import format_paths
from kvtier.pools.nvme_recovery import RecoveredBlocks
from kvtier.pools.superblock import ROW_COUNT_MAX
from kvtier.types import BlockHash

TARGETS = {"recovery_s": measure.Target(at_most=2.0)}
BLOCK_BYTES = 2 << 20
HASH_BYTES = 32
_FINGERPRINT = b"bench-recovery--"
_EPOCH = 1
_STEP = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=positive, default=1_000_000, help="(1000000)")
    parser.add_argument("--rounds", type=positive, default=3, help="(3)")
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


def _measure(path: Path, slot_count: int, rounds: int) -> dict[str, object]:
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
    times, cpus, dicts = [], [], []
    for _ in range(rounds):
        seconds, cpu_seconds, found, is_direct = _recover(path)
        if len(found.slots) != slot_count:
            raise KVTierError(f"{len(found.slots)} of {slot_count} blocks were recovered")
        times.append(seconds)
        cpus.append(cpu_seconds)
        dicts.append(_dict_seconds(found))
        say(f"recovered in {seconds:.2f} s; a dict of the hashes takes {dicts[-1]:.2f} s")
    return {
        "recovery_s": min(times),
        "recovery_median_s": measure.percentile(times, 50),
        "recovery_cpu_s": min(cpus),
        "dict_build_s": min(dicts),
        "table_was_cold": is_direct,
        "slots": slot_count,
        "segments": segment_count,
        "table_mib": slot_count * 128 / 2**20,
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
        raw = os.urandom(HASH_BYTES * count)
        hashes = [
            BlockHash(raw[place : place + HASH_BYTES]) for place in range(0, len(raw), HASH_BYTES)
        ]
        checksums = np.arange(first + 1, first + count + 1, dtype=np.uint64)
        parents = [None, *hashes[:-1]]
        sequence = book.take_sequences(count)
        pool.write_ready(slots, hashes, parents, checksums, epoch=_EPOCH, sequence=sequence)
        book.commit(slots)
    while (batch := pool.write_table()) is not None:
        batch.wait()
        batch.wait_returned()
    pool.close(clean=False)


def _recover(path: Path) -> tuple[float, float, RecoveredBlocks, bool]:
    started, cpu_started = time.perf_counter(), time.process_time()
    driver = FileDriver(path)
    pool = NvmePool([driver])
    found = pool.recover({_FINGERPRINT: _EPOCH})
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    is_direct = driver.is_direct
    pool.close(clean=False)
    return seconds, cpu_seconds, found, is_direct


def _dict_seconds(found: RecoveredBlocks) -> float:
    """What the index would cost if a dict were all of it."""
    packed = found.hashes.tobytes()
    hashes = [packed[place : place + HASH_BYTES] for place in range(0, len(packed), HASH_BYTES)]
    started = time.perf_counter()
    built = dict(zip(hashes, range(len(hashes)), strict=True))
    seconds = time.perf_counter() - started
    assert len(built) == len(found.slots)
    return seconds
