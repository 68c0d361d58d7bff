"""`kvtier bench tiers`: each tier's put and get, beside the raw medium or the engine's own client.

What a tier needs is started here and removed at the end: a Redis or Valkey server, a Mooncake
master and a process that lends it memory. What cannot be run is said, with its reason
(`not_run`), and has no figures. All bytes that come back are compared with what was put.

    dram       copies between an engine's memory and slots, one thread; beside it np.copyto
    cxl        the tier's copies, in its threads; beside it np.copyto in as many. Emulated:
               ordinary memory, not held back
    cxl_node   the same on a node without processors, where the machine has one
    nvme       the pool with its checksums and table (--path); beside it reads and writes of a file
    files      blocks of a shared folder, in the directory for temporary files or --path; beside it
               files of the same size, written, renamed and read
    redis      blocks in a server by TCP; beside it the redis package, pipelined
    mooncake   blocks in another process by TCP; beside it Mooncake's client on registered memory

The engines' servers have half of the cores, both clients the other half: as on two machines.

    …_put_ratio, …_get_ratio   of speeds within a round; median over the rounds
    …_gbps, …_raw_gbps         medians over the rounds, of batches
    …_p50_ms, …_p99_ms         of lone blocks; …_raw_… beside it
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier.cli import bench_run, bench_servers, measure
from kvtier.cli import bench_tiers_memory as in_memory
from kvtier.cli import bench_tiers_remote as in_engine
from kvtier.cli.bench_tiers_rounds import OURS, RAW, RoundPlan, Side, figures_of, measure_sides
from kvtier.cli.neighbours import Neighbours
from kvtier.cli.output import say
from kvtier.cli.private_daemon import signals_as_exceptions
from kvtier.cli.sizes import positive, size
from kvtier.clock import SystemClock
from kvtier.errors import KVTierError
from kvtier.io.nodes import read_nodes
from kvtier.io.throttle import EmulatedSpeed
from kvtier.layout import SEGMENT_BYTES
from kvtier.memory import Bytes
from kvtier.pools.cxl import CxlMemory, EmulatedMemory, NodeMemory
from kvtier.pools.nvme_paths import format_paths
from kvtier.pools.remote.files import FilesEngine, FilesSettings, prepare_root
from kvtier.pools.remote.mooncake import MooncakeEngine, MooncakeSettings
from kvtier.pools.remote.redis import RedisEngine, RedisSettings
from kvtier.pools.slabs import best_page_kind, populate_slab
from kvtier.types import SlabId

MEMORY_TARGET, ENGINE_TARGET = measure.Target(at_least=0.9), measure.Target(at_least=0.8)
TARGETS = {
    "dram": MEMORY_TARGET,
    "cxl": MEMORY_TARGET,
    "cxl_node": MEMORY_TARGET,
    "redis": ENGINE_TARGET,
    "mooncake": ENGINE_TARGET,
}
SINGLES = 8
_NOT_HELD_BACK = EmulatedSpeed(1e15)
_RUBBISH = 0xEE


class NotRun(Exception):
    """Why a tier cannot be measured here."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Memory that all tiers share, one view a block; and where files may be made."""

    sources: Sequence[Bytes]
    targets: Sequence[Bytes]
    folder: Path
    disk: Path | None  # In the directory that --path names.

    @property
    def block_bytes(self) -> int:
        return self.sources[0].nbytes

    @property
    def batch_bytes(self) -> int:
        return self.block_bytes * len(self.sources)


Sides = tuple[Side, Side]
Opener = Callable[[Bench], contextlib.AbstractContextManager[Sides]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tiers", nargs="+", choices=list(_OPENERS), default=list(_OPENERS), metavar="TIER"
    )
    parser.add_argument(
        "--path", type=Path, metavar="DIR", help="directory on the disk of an NVMe tier"
    )
    parser.add_argument("--blocks", type=positive, default=32, help="a batch (32)")
    parser.add_argument("--block-bytes", type=size, default=2 << 20, help="(2MiB)")
    parser.add_argument("--rounds", type=positive, default=15, help="(15)")


def run(arguments: argparse.Namespace) -> int:
    with signals_as_exceptions(), contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(_folder(None)))
        disk = Path(stack.enter_context(_folder(arguments.path))) if arguments.path else None
        sources, targets = (_memory(arguments) for _ in range(2))
        for view in sources:
            np.copyto(view, np.frombuffer(os.urandom(view.nbytes), np.uint8))
        bench = Bench(sources, targets, folder, disk)
        plan = RoundPlan(arguments.blocks, arguments.rounds, SINGLES)
        figures, wrong_count = _measure(bench, plan, arguments.tiers)
    targets_met = {
        name: target
        for tier, target in TARGETS.items()
        for name in (f"{tier}_put_ratio", f"{tier}_get_ratio")
        if name in figures
    }
    return bench_run.report(
        arguments,
        figures,
        targets_met,
        page_kind=str(best_page_kind()),
        is_wrong=wrong_count > 0,
    )


def _measure(bench: Bench, plan: RoundPlan, tiers: Sequence[str]) -> tuple[dict[str, object], int]:
    figures: dict[str, object] = {
        "rounds": plan.round_count,
        "blocks": plan.block_count,
        "block_bytes": bench.block_bytes,
    }
    not_run: dict[str, str] = {}
    wrong = _WrongBlocks(bench)
    neighbours = Neighbours()
    for tier in tiers:
        try:
            with _OPENERS[tier](bench) as (ours, raw):
                found = measure_sides(
                    {OURS: ours, RAW: raw},
                    plan,
                    before_get=wrong.before_get,
                    after_get=wrong.after_get,
                )
        except (NotRun, KVTierError) as error:
            not_run[tier] = str(error)
            say(f"{tier}: not run: {error}")
            continue
        figures.update(figures_of(tier, found, bench.batch_bytes))
        ways = (f"{way} {figures[f'{tier}_{way}_ratio']:.2f}" for way in ("put", "get"))
        say(f"{tier}: {', '.join(ways)} of what is beside it")
    figures.update(
        {
            "wrong_blocks": wrong.count,
            "not_run": not_run,
            "neighbour_cores": neighbours.cores(),
        }
    )
    return figures, wrong.count


class _WrongBlocks:
    """Compares what came back with what was put."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.count = 0

    def before_get(self, side: str) -> None:
        for view in self._bench.targets:
            view.fill(_RUBBISH)

    def after_get(self, side: str) -> None:
        pairs = zip(self._bench.targets, self._bench.sources, strict=True)
        self.count += sum(not np.array_equal(target, source) for target, source in pairs)


def _memory(arguments: argparse.Namespace) -> list[Bytes]:
    length_bytes = -(-arguments.blocks * arguments.block_bytes // (2 << 20)) * (2 << 20)
    slab = populate_slab(SlabId(1), length_bytes, best_page_kind(), clock=SystemClock())
    return _cut(slab.mapping.array, arguments.block_bytes, arguments.blocks)


def _cut(memory: Bytes, block_bytes: int, count: int) -> list[Bytes]:
    return [memory[at * block_bytes : (at + 1) * block_bytes] for at in range(count)]


@contextlib.contextmanager
def _folder(parent: Path | None) -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="kvtier-bench-", dir=parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------ tiers


@contextlib.contextmanager
def _dram(bench: Bench) -> Iterator[Sides]:
    slab = populate_slab(SlabId(1), _slab_bytes(bench), best_page_kind(), clock=SystemClock())
    slots = _cut(slab.mapping.array, bench.block_bytes, len(bench.sources))
    ours, raw = (
        in_memory.MemorySide(
            copy, sources=bench.sources, slots=slots, targets=bench.targets, thread_count=1
        )
        for copy in (in_memory.plain_copy, in_memory.bare_copy)
    )
    yield ours, raw


@contextlib.contextmanager
def _cxl(bench: Bench) -> Iterator[Sides]:
    slab_bytes = _slab_bytes(bench)
    memory = EmulatedMemory(
        _NOT_HELD_BACK, SystemClock(), slab_bytes=slab_bytes, budget_bytes=slab_bytes
    )
    with _cxl_sides(bench, memory) as sides:
        yield sides


@contextlib.contextmanager
def _cxl_node(bench: Bench) -> Iterator[Sides]:
    node = next((one for one in read_nodes() if one.has_only_memory), None)
    if node is None:
        raise NotRun("this machine has no node without processors")
    slab_bytes = _slab_bytes(bench)
    memory = NodeMemory(node.index, slab_bytes=slab_bytes, budget_bytes=slab_bytes)
    with _cxl_sides(bench, memory) as sides:
        yield sides


@contextlib.contextmanager
def _cxl_sides(bench: Bench, memory: CxlMemory) -> Iterator[Sides]:
    try:
        slab = memory.source.populate(
            SlabId(1), memory.slab_bytes, clock=SystemClock(), is_cancelled=lambda: False
        )
    except OSError as error:
        raise NotRun(f"{memory.label}: {error.strerror}") from None
    slots = _cut(slab.mapping.array, bench.block_bytes, len(bench.sources))
    try:
        yield in_memory.cxl_sides(
            memory.copy_batch, sources=bench.sources, slots=slots, targets=bench.targets
        )
    finally:
        del slots
        memory.source.end(slab)
        memory.close()


@contextlib.contextmanager
def _nvme(bench: Bench) -> Iterator[Sides]:
    if bench.disk is None:
        raise NotRun("--path names no directory on the disk to measure")
    pool, beside = bench.disk / "pool", bench.disk / "beside"
    segment_count = 2 * -(-bench.batch_bytes // SEGMENT_BYTES)
    format_paths(
        [pool],
        segment_count * SEGMENT_BYTES + SEGMENT_BYTES // 2,
        pool_id=os.urandom(16),
        generation=int.from_bytes(os.urandom(8), sys.byteorder),
    )
    with beside.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, bench.batch_bytes)
    ours = in_memory.NvmeSide(pool, sources=bench.sources, targets=bench.targets)
    raw = in_memory.RawFileSide(beside, sources=bench.sources, targets=bench.targets)
    try:
        # A first write into fresh space is slower.
        for _ in range(-(-segment_count * SEGMENT_BYTES // bench.batch_bytes)):
            ours.put(range(len(bench.sources)))
        yield ours, raw
    finally:
        ours.pool.close(clean=False)
        raw.close()


@contextlib.contextmanager
def _files(bench: Bench) -> Iterator[Sides]:
    parent = bench.disk or bench.folder
    prepare_root(parent / "share")
    settings = FilesSettings(parent / "share", capacity_bytes=1 << 40)
    memory = {"sources": bench.sources, "targets": bench.targets}
    ours = in_engine.RemoteSide(
        lambda buffers: FilesEngine(settings, unique="bench", buffers=buffers), **memory
    )
    with contextlib.closing(ours):
        yield ours, in_engine.FolderSide(parent / "beside-share", **memory)


@contextlib.contextmanager
def _redis(bench: Bench) -> Iterator[Sides]:
    binary = bench_servers.redis_binary()
    if binary is None:
        raise NotRun("neither valkey-server nor redis-server is installed")
    memory = {"sources": bench.sources, "targets": bench.targets}
    with contextlib.ExitStack() as stack:
        cores = stack.enter_context(bench_servers.apart())
        port = stack.enter_context(bench_servers.redis_server(binary, bench.folder, cores))
        settings = RedisSettings((("127.0.0.1", port),))
        ours = in_engine.RemoteSide(
            lambda buffers: RedisEngine(settings, buffers=buffers), **memory
        )
        stack.enter_context(contextlib.closing(ours))
        raw = stack.enter_context(contextlib.closing(in_engine.RedisClientSide(port, **memory)))
        yield ours, raw


@contextlib.contextmanager
def _mooncake(bench: Bench) -> Iterator[Sides]:
    binary = bench_servers.mooncake_binary()
    if binary is None:
        raise NotRun("no wheel of mooncake-transfer-engine is installed (kvtier[mooncake])")
    memory = {"sources": bench.sources, "targets": bench.targets}
    segment_bytes = max(256 << 20, -(-4 * bench.batch_bytes // (16 << 20)) * (16 << 20))
    with contextlib.ExitStack() as stack:
        cores = stack.enter_context(bench_servers.apart())
        cluster = bench_servers.mooncake_cluster(binary, bench.folder, segment_bytes, cores)
        master = stack.enter_context(cluster)
        settings = MooncakeSettings(master, "127.0.0.1")
        ours = in_engine.RemoteSide(
            lambda buffers: MooncakeEngine(settings, buffers=buffers), **memory
        )
        stack.enter_context(contextlib.closing(ours))
        raw = stack.enter_context(
            contextlib.closing(in_engine.MooncakeClientSide(master, **memory))
        )
        yield ours, raw


def _slab_bytes(bench: Bench) -> int:
    return -(-bench.batch_bytes // (2 << 20)) * (2 << 20)


_OPENERS: dict[str, Opener] = {
    "dram": _dram,
    "cxl": _cxl,
    "cxl_node": _cxl_node,
    "nvme": _nvme,
    "files": _files,
    "redis": _redis,
    "mooncake": _mooncake,
}
