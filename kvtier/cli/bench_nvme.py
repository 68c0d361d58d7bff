"""`kvtier bench nvme`: the NVMe tier's own path against fio, on one file, in one run.

A pool is formatted in a directory, written once (a first write into fresh space is slower), and
removed at the end. Then, in rounds: all blocks written by the pool and by fio, on the same part of
the file with the same block size and depth; then read, in random order, by both. In each round one
goes first and last and the other twice in between, and then the other way round, so that what the
disk and the neighbours do hits both alike.

The pool's figures contain all it does: reserving, checksums verified before a write and after a
read, and the slot table. fio does nothing but the transfers, from buffers for one queue (8 MiB),
which stay in the processor's cache; the pool's are as many as a daemon may have under way.

    write_gbps, read_gbps           the pool's, on the best pages this machine gives
    write_ratio, read_ratio         of that to fio's with its own queue; median over the rounds
    …_ratio_threads                 the same to fio with as many threads as the pool has
    write_us_huge, read_us_huge     processor time of the whole process a block, checksums included
    write_us_base, read_us_base     the same with buffers on 4 KiB pages
    checksum_us                     of that, one checksum over one block
    neighbour_cores                 what other processes took of the cores meanwhile: if much, the
                                    time of checksums is longer in the ratios than it would be
"""

from __future__ import annotations

import argparse
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
from kvtier.cli.fio import THREADS, Fio, FioJob
from kvtier.cli.neighbours import Neighbours
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
POOL = "pool"  # Among fio's engines.
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
    parser.add_argument("--rounds", type=positive, default=12, help="(12)")


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
    bench = NvmeBench(NvmePool([driver]))
    try:
        if not driver.is_direct:
            say(f"not direct, the page cache is measured: {driver.buffered_reason}")
        say(f"writing {bytes_text(bench.count * BLOCK_BYTES)} once")
        bench.write(bench.huge)
        fio = None
        if Fio.is_installed():
            first = bench.pool.geometry.segments_first
            length_bytes = bench.count * BLOCK_BYTES
            fio = Fio(FioJob(path, first, length_bytes, BLOCK_BYTES, arguments.depth))
        neighbours = Neighbours()
        rounds = [_round(bench, fio, turn) for turn in range(arguments.rounds)]
        neighbour_cores = neighbours.cores()
    finally:
        bench.pool.close(clean=False)
    figures = _figures(bench, rounds)
    figures.update({"neighbour_cores": neighbour_cores, "depth": arguments.depth})
    figures["is_direct"] = driver.is_direct
    if fio is None or not fio.engines:
        why = "fio is not installed" if fio is None else "fio did not run here"
        say(f"{why}: no ratios")
        figures["fio"] = why
        return figures, {}, str(bench.huge.kind)
    figures.update(_ratios(fio, rounds))
    return figures, TARGETS, str(bench.huge.kind)


def _round(bench: NvmeBench, fio: Fio | None, turn: int) -> _Round:
    """Every kind of pass, some of them twice. What fio writes is written over by the pool before
    it is read."""
    found = _Round()
    order = [POOL, *(fio.engines if fio is not None else ())][:: -1 if turn % 2 else 1]
    for side, kind in (("write", "write"), ("read", "randread")):
        for one in [*order, *reversed(order)]:
            if fio is None or one == POOL:
                found.add(side, bench.run(bench.huge, side), bench.count)
            else:
                found.add(f"{one}_{side}", Pass(*fio.run(kind, one)), bench.count)
        found.add(f"{side}_base", bench.run(bench.base, side), bench.count)
    say(
        f"round {turn + 1}: "
        + ", ".join(f"{name} {found.gbps(name):.2f}" for name in found.passes)
        + " GB/s"
    )
    return found


def _figures(bench: NvmeBench, rounds: Sequence[_Round]) -> dict[str, object]:
    figures: dict[str, object] = {}
    for side in ("write", "read"):
        figures[f"{side}_gbps"] = median(one.gbps(side) for one in rounds)
        figures[f"{side}_gbps_base"] = median(one.gbps(f"{side}_base") for one in rounds)
        figures[f"{side}_us_huge"] = median(one.cpu_us(side) for one in rounds)
        figures[f"{side}_us_base"] = median(one.cpu_us(f"{side}_base") for one in rounds)
    figures["checksum_us"] = bench.checksum_us()
    figures.update({"blocks": bench.count, "block_bytes": BLOCK_BYTES})
    return figures


def _ratios(fio: Fio, rounds: Sequence[_Round]) -> dict[str, object]:
    figures: dict[str, object] = {"fio_memory": fio.memory, "fio_engine": fio.engines[0]}
    for engine in fio.engines:
        end = "_threads" if engine == THREADS and len(fio.engines) > 1 else ""
        for side in ("write", "read"):
            name = f"{engine}_{side}"
            ratios = [one.gbps(side) / one.gbps(name) for one in rounds]
            figures[f"{side}_ratio{end}"] = median(ratios)
            figures[f"{side}_ratios{end}"] = [round(ratio, 3) for ratio in ratios]
            figures[f"fio_{side}_gbps{end}"] = median(one.gbps(name) for one in rounds)
            figures[f"fio_{side}_us{end}"] = median(one.cpu_us(name) for one in rounds)
    return figures


class _Round:
    """Passes by name; those of one name are added up."""

    def __init__(self) -> None:
        self.passes: dict[str, list[Pass]] = {}
        self._block_count = 0

    def add(self, name: str, done: Pass, block_count: int) -> None:
        self.passes.setdefault(name, []).append(done)
        self._block_count = block_count

    def gbps(self, name: str) -> float:
        blocks = self._block_count * len(self.passes[name])
        return blocks * BLOCK_BYTES / sum(one.seconds for one in self.passes[name]) / 1e9

    def cpu_us(self, name: str) -> float:
        blocks = self._block_count * len(self.passes[name])
        return 1e6 * sum(one.cpu_seconds for one in self.passes[name]) / blocks


class NvmeBench:
    """All slots of one pool, written and read again and again."""

    def __init__(self, pool: NvmePool) -> None:
        self.pool = pool
        pool.recover({})
        self._book = book_of(pool)
        self.count = self._book.segment_count * self._book.slot_count(_LAYOUT)
        self.huge, self.base = _Ring(best_page_kind()), _Ring(PageKind.BASE)
        self._slots: Slots = np.empty(0, np.uint32)
        self._chance = random.Random(3)

    def run(self, ring: _Ring, side: str) -> Pass:
        return self.write(ring) if side == "write" else self.read(ring)

    def write(self, ring: _Ring) -> Pass:
        """Every slot of the pool anew."""
        ring.fill()
        slots: list[Slots] = []
        under_way: list[tuple[Batch, Slots, Checksums]] = []
        wall, cpu = time.perf_counter(), time.process_time()
        for first in range(0, self.count, BATCH_COUNT):
            count = min(BATCH_COUNT, self.count - first)
            place = first % (RING_BATCHES * BATCH_COUNT)
            if len(under_way) == RING_BATCHES:
                slots.append(self._commit(*under_way.pop(0)))
            reserved = reserve(self.pool, self._book, _FINGERPRINT, _LAYOUT, count)
            blocks = ring.blocks[place : place + count]
            checksums = ring.checksums[place : place + count]
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
        for first in range(0, self.count, BATCH_COUNT):
            place = first % (RING_BATCHES * BATCH_COUNT)
            if len(under_way) == RING_BATCHES:
                _assert_done(under_way.pop(0))
            slots = np.array(order[first : first + BATCH_COUNT], np.uint32)
            blocks = ring.blocks[place : place + len(slots)]
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
