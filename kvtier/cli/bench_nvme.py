"""`kvtier bench nvme`: the NVMe tier's own path against fio, on one file, in one run.

A pool is formatted in a directory, written once (a first write into fresh space is slower), and
removed at the end. Then, in rounds that change the order: all blocks written by the pool, read by
the pool in random order, and the same by fio on the same part of the file with the same block size
and depth. The pool's figures contain all it does: reserving, checksums verified before a write and
after a read, and the slot table. fio does nothing but the transfers.

    write_gbps, read_gbps           the pool's, on the best pages this machine gives
    write_ratio, read_ratio         of that to fio's; median over the rounds
    write_us_huge, read_us_huge     processor time of the whole process a block, checksums included
    write_us_base, read_us_base     the same with buffers on 4 KiB pages
    checksum_us                     of that, one checksum over one block
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from kvtier.cli import bench_run, measure
from kvtier.cli.fio import Fio, FioJob
from kvtier.cli.output import bytes_text, say
from kvtier.cli.pool_book import book_of, reserve
from kvtier.cli.sizes import positive, size
from kvtier.clock import SystemClock
from kvtier.errors import BadRequest, KVTierError
from kvtier.io.checksum import Checksums, block_checksums
from kvtier.io.driver import Batch, Outcome
from kvtier.io.file import DEPTH, FileDriver
from kvtier.layout import SEGMENT_BYTES, SlotLayout
from kvtier.memory import Bytes
from kvtier.pools.nvme import NvmePool
from kvtier.pools.nvme_paths import format_paths
from kvtier.pools.slabs import PageKind, best_page_kind, populate_slab
from kvtier.pools.slot_table import Slots
from kvtier.types import BlockHash, SlabId

TARGETS = {
    "write_ratio": measure.Target(at_least=0.9),
    "read_ratio": measure.Target(at_least=0.9),
}
BLOCK_BYTES = 2 << 20
BATCH_COUNT = 16
RING_BATCHES = 4  # Enough to keep the queue full while one batch is being looked after.
_FINGERPRINT = b"bench-nvme------"
_LAYOUT = SlotLayout(BLOCK_BYTES, 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--path",
        type=Path,
        metavar="DIR",
        default=Path(tempfile.gettempdir()),
        help="directory on the disk to measure (the one for temporary files)",
    )
    parser.add_argument("--bytes", type=size, dest="length_bytes", default=1 << 30, help="(1GiB)")
    parser.add_argument("--depth", type=positive, default=DEPTH, help=f"calls at once ({DEPTH})")
    parser.add_argument("--rounds", type=positive, default=4, help="(4)")


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over all blocks."""

    seconds: float
    cpu_seconds: float


@dataclass
class _Ring:
    """Buffers for RING_BATCHES batches, on one kind of pages."""

    kind: PageKind
    blocks: list[list[Bytes]] = field(init=False)
    checksums: Checksums = field(init=False)

    def __post_init__(self) -> None:
        length_bytes = RING_BATCHES * BATCH_COUNT * BLOCK_BYTES
        self._slab = populate_slab(SlabId(1), length_bytes, self.kind, clock=SystemClock())
        self.kind = self._slab.page_kind
        self.blocks = [[row] for row in self._slab.mapping.array.reshape(-1, BLOCK_BYTES)]

    def fill(self) -> None:
        """Random bytes: a disk must not be able to make them smaller."""
        chance = np.random.default_rng(7)
        for [view] in self.blocks:
            np.copyto(view, chance.integers(0, 256, BLOCK_BYTES, np.uint8))
        self.checksums = block_checksums(self.blocks)


def run(arguments: argparse.Namespace) -> int:
    segments = arguments.length_bytes // SEGMENT_BYTES
    if segments == 0:
        raise BadRequest("--bytes: give at least 256MiB")
    folder = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=arguments.path))
    try:
        figures, targets, page_kind = _measure(arguments, folder / "pool", segments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return bench_run.report(arguments, figures, targets, page_kind=page_kind)


def _measure(
    arguments: argparse.Namespace, path: Path, segments: int
) -> tuple[dict[str, object], dict[str, measure.Target], str]:
    # The tables of a few segments fit into half a segment; it is not usable itself.
    format_paths(
        [path],
        segments * SEGMENT_BYTES + SEGMENT_BYTES // 2,
        pool_id=os.urandom(16),
        generation=int.from_bytes(os.urandom(8), sys.byteorder),
    )
    driver = FileDriver(path, depth=arguments.depth)
    bench = _NvmeBench(NvmePool([driver]))
    try:
        if not driver.is_direct:
            say(f"not direct, the page cache is measured: {driver.buffered_reason}")
        say(f"writing {bytes_text(bench.count * BLOCK_BYTES)} once")
        bench.write(bench.huge)
        geometry = bench.pool.geometry
        job = FioJob(
            path,
            geometry.segments_first,
            bench.count * BLOCK_BYTES,
            BLOCK_BYTES,
            arguments.depth,
        )
        fio = Fio(arguments.depth, BLOCK_BYTES) if Fio.is_installed() else None
        rounds = [_round(bench, fio, job, turn) for turn in range(arguments.rounds)]
    finally:
        bench.pool.close(clean=False)
    figures = _figures(bench, fio, rounds)
    figures.update({"depth": arguments.depth, "is_direct": driver.is_direct})
    if fio is None or "fio_write" not in rounds[0]:
        why = "fio is not installed" if fio is None else "fio did not run here"
        say(f"{why}: no ratios")
        figures["fio"] = why
        return figures, {}, str(bench.huge.kind)
    return figures, TARGETS, str(bench.huge.kind)


def _round(bench: _NvmeBench, fio: Fio | None, job: FioJob, turn: int) -> dict[str, float]:
    """Seconds and processor time of each kind of pass; what fio writes is written over again."""
    found: dict[str, float] = {}

    def ours(name: str, ring: _Ring, *, is_read: bool) -> None:
        done = bench.read(ring) if is_read else bench.write(ring)
        found[name] = bench.count * BLOCK_BYTES / done.seconds
        found[name + "_us"] = 1e6 * done.cpu_seconds / bench.count

    def theirs(name: str, kind: str) -> None:
        figures = fio.run(job, kind) if fio is not None else None
        if figures is not None:
            found[name] = figures.bytes_per_second
            found[name + "_us"] = figures.cpu_us_per_block

    if turn % 2:
        theirs("fio_write", "write")
        ours("write", bench.huge, is_read=False)
        ours("read", bench.huge, is_read=True)
        theirs("fio_read", "randread")
    ours("write_base", bench.base, is_read=False)
    ours("read_base", bench.base, is_read=True)
    if not turn % 2:
        ours("write", bench.huge, is_read=False)
        theirs("fio_write", "write")
        theirs("fio_read", "randread")
        bench.write(bench.huge)
        ours("read", bench.huge, is_read=True)
    say(
        f"round {turn + 1}: "
        + ", ".join(f"{k} {v / 1e9:.2f}" for k, v in found.items() if not k.endswith("_us"))
        + " GB/s"
    )
    return found


def _figures(
    bench: _NvmeBench, fio: Fio | None, rounds: Sequence[dict[str, float]]
) -> dict[str, object]:
    def middle(name: str, scale: float = 1.0) -> float:
        values = [one[name] / scale for one in rounds if name in one]
        return median(values) if values else math.nan

    figures: dict[str, object] = {
        "write_gbps": middle("write", 1e9),
        "read_gbps": middle("read", 1e9),
        "write_gbps_base": middle("write_base", 1e9),
        "read_gbps_base": middle("read_base", 1e9),
        "write_us_huge": middle("write_us"),
        "read_us_huge": middle("read_us"),
        "write_us_base": middle("write_base_us"),
        "read_us_base": middle("read_base_us"),
        "checksum_us": bench.checksum_us(),
        "blocks": bench.count,
        "block_bytes": BLOCK_BYTES,
    }
    if fio is not None and "fio_write" in rounds[0]:
        for side in ("write", "read"):
            ratios = [one[side] / one[f"fio_{side}"] for one in rounds]
            figures[f"{side}_ratio"] = median(ratios)
            figures[f"{side}_ratios"] = [round(ratio, 3) for ratio in ratios]
            figures[f"fio_{side}_gbps"] = middle(f"fio_{side}", 1e9)
            figures[f"fio_{side}_us"] = middle(f"fio_{side}_us")
        figures["fio_memory"] = fio.memory
        figures["fio_engine"] = fio.engine
    return figures


class _NvmeBench:
    def __init__(self, pool: NvmePool) -> None:
        self.pool = pool
        pool.recover({})
        self._book = book_of(pool)
        self.count = self._book.segment_count * self._book.slot_count(_LAYOUT)
        self.huge, self.base = _Ring(best_page_kind()), _Ring(PageKind.BASE)
        self._slots: Slots = np.empty(0, np.uint32)
        self._chance = random.Random(3)

    def write(self, ring: _Ring) -> Pass:
        """Every slot of the pool anew."""
        ring.fill()
        slots: list[Slots] = []
        under_way: list[tuple[Batch, Slots, Checksums]] = []
        wall, cpu = time.perf_counter(), time.process_time()
        for number in range(self.count // BATCH_COUNT):
            place = number % RING_BATCHES * BATCH_COUNT
            if len(under_way) == RING_BATCHES:
                slots.append(self._commit(*under_way.pop(0)))
            reserved = reserve(self.pool, self._book, _FINGERPRINT, _LAYOUT, BATCH_COUNT)
            blocks = ring.blocks[place : place + BATCH_COUNT]
            checksums = ring.checksums[place : place + BATCH_COUNT]
            batch = self.pool.write_blocks(reserved.slots, blocks, checksums)
            under_way.append((batch, reserved.slots, checksums))
        slots.extend(self._commit(*one) for one in under_way)
        if (table := self.pool.write_table()) is not None:
            table.wait()
        done = Pass(time.perf_counter() - wall, time.process_time() - cpu)
        self._slots = np.concatenate(slots)
        return done

    def read(self, ring: _Ring) -> Pass:
        """Every block, in random order."""
        order = self._slots.tolist()
        self._chance.shuffle(order)
        under_way: list[Batch] = []
        wall, cpu = time.perf_counter(), time.process_time()
        for number in range(self.count // BATCH_COUNT):
            place = number % RING_BATCHES * BATCH_COUNT
            if len(under_way) == RING_BATCHES:
                _assert_done(under_way.pop(0))
            first = number * BATCH_COUNT
            slots = np.array(order[first : first + BATCH_COUNT], np.uint32)
            blocks = ring.blocks[place : place + BATCH_COUNT]
            under_way.append(self.pool.read_blocks(slots, blocks))
        for batch in under_way:
            _assert_done(batch)
        return Pass(time.perf_counter() - wall, time.process_time() - cpu)

    def checksum_us(self) -> float:
        started = time.thread_time()
        block_checksums(self.huge.blocks)
        return 1e6 * (time.thread_time() - started) / len(self.huge.blocks)

    def _commit(self, batch: Batch, slots: Slots, checksums: Checksums) -> Slots:
        _assert_done(batch)
        hashes = [BlockHash(b"%032d" % slot) for slot in slots.tolist()]
        parents = [None] * len(slots)
        sequence = self._book.take_sequences(len(slots))
        self.pool.write_ready(slots, hashes, parents, checksums, epoch=1, sequence=sequence)
        self._book.commit(slots)
        return slots


def _assert_done(batch: Batch) -> None:
    outcomes = set(batch.wait())
    if outcomes != {Outcome.DONE}:
        raise KVTierError(f"the disk answered {sorted(map(str, outcomes))}")
