"""`kvtier bench restart`: kill -9 a daemon with a million blocks in memory, and start it again.

A holder process (`kvtier hold`) keeps the memory. A session commits the blocks, 64 bytes each: what
costs time is their number. Then, --rounds times: the daemon is killed and started, and asked how
many blocks it has until all are there; then for chains of them.

    ready_s            from spawn to READY: memory is taken over and calls are answered. The least
                       of --rounds; `ready_median_s` the median
    ready_cpu_s        the daemon's processor time by then; of the round with the least ready_s
    all_s, all_cpu_s   likewise until the last block is a hit again
    start_s            of the same daemon before it had anything, the interpreter included
    found_share        of the blocks of a thousand chains, hits then; the least of the rounds
    engine_blocks      that the session of before, an engine's, reads after the last restart
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.cli import bench_run, measure
from kvtier.cli.bench_fill import SLAB_BYTES, SLOT_BYTES, Filler, budget_bytes, spec_of
from kvtier.cli.bench_tree import ChainTree
from kvtier.cli.connect import connected, open_namespace
from kvtier.cli.output import say
from kvtier.cli.private_daemon import (
    PrivateDaemon,
    end_process,
    private_daemon,
    signals_as_exceptions,
    tied_process,
)
from kvtier.cli.processes import cpu_seconds
from kvtier.cli.sizes import positive
from kvtier.client.client import Client
from kvtier.errors import KVTierError, Unavailable
from kvtier.namespace import NamespaceSpec
from kvtier.types import Role

TARGETS = {
    "ready_s": measure.Target(at_most=2.0),
    "found_share": measure.Target(at_least=0.99),
}
_CHAIN_BLOCKS = 128
_ASKED_CHAINS = 1000
_ALL_SECONDS_MAX = 120.0
_POLL_SECONDS = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resident", type=positive, default=1_000_000, help="blocks (1000000)")
    parser.add_argument("--rounds", type=positive, default=5, help="(5)")


@dataclass(frozen=True, slots=True)
class _Round:
    ready_seconds: float
    ready_cpu_seconds: float
    all_seconds: float
    all_cpu_seconds: float
    found_count: int


def run(arguments: argparse.Namespace) -> int:
    tree = ChainTree(resident_count=arguments.resident, chain_length=_CHAIN_BLOCKS, seed=1)
    memory_bytes = budget_bytes(arguments.resident)
    spec = spec_of(16, secrets.token_hex(8))
    with signals_as_exceptions(), _holder() as holder:
        options = {
            "dram.bytes": str(memory_bytes),
            "dram.slab_bytes": str(min(SLAB_BYTES, memory_bytes)),
            "dram.watermark_stop": "1.0",
            "restart.holder": str(holder),
        }
        with private_daemon(options) as daemon:
            start_seconds = daemon.start_seconds
            with connected(daemon.socket, role=Role.BOTH, name="bench restart") as engine:
                _fill(engine, spec, tree)
                rounds = [_restart(daemon, spec, tree, n) for n in range(arguments.rounds)]
                chain = tree.full_chain(0)
                read = _read(engine, spec, chain)
    figures = _figures(rounds, tree, start_seconds)
    figures["engine_blocks"] = len(read)
    is_wrong = read != [bytes(SLOT_BYTES)] * len(chain)  # The slots are zeros and stay so.
    return bench_run.report(arguments, figures, TARGETS, is_wrong=is_wrong)


@contextlib.contextmanager
def _holder() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kvtier-bench-"))
    path = directory / "holder.sock"
    process = tied_process(["hold", str(path)], subprocess.DEVNULL)
    try:
        assert process.stdout is not None, "stdout is a pipe"
        if not process.stdout.readline().startswith("READY"):
            raise Unavailable("the holder of the daemon's memory did not start")
        yield path
    finally:
        end_process(process)
        shutil.rmtree(directory, ignore_errors=True)


def _fill(engine: Client, spec: NamespaceSpec, tree: ChainTree) -> None:
    filler = Filler(engine, open_namespace(engine, spec))
    for parent, packed in tree.runs():
        filler.commit_run(parent, packed)
    filler.finish()
    say(f"{filler.committed_count} blocks committed")
    if filler.committed_count != tree.resident_count:
        raise KVTierError("not all blocks became resident: the pool is too small")


def _restart(daemon: PrivateDaemon, spec: NamespaceSpec, tree: ChainTree, number: int) -> _Round:
    daemon.kill()
    began = time.monotonic()
    daemon.start()
    ready_cpu = cpu_seconds(daemon.pid)
    with connected(daemon.socket, role=Role.TOOL, name="bench restart asks") as client:
        while (tier := client.stats().tiers[0]).ready_count < tree.resident_count:
            if time.monotonic() - began > _ALL_SECONDS_MAX:
                break
            time.sleep(_POLL_SECONDS)
        all_seconds, all_cpu = time.monotonic() - began, cpu_seconds(daemon.pid)
        found = _found_count(client, spec, tree)
    say(
        f"round {number + 1}: ready after {daemon.start_seconds:.2f} s, {tier.ready_count} blocks "
        f"after {all_seconds:.2f} s"
    )
    return _Round(daemon.start_seconds, ready_cpu, all_seconds, all_cpu, found)


def _found_count(client: Client, spec: NamespaceSpec, tree: ChainTree) -> int:
    """Hits among the blocks of the chains asked for, those that chains share counted with each."""
    namespace = open_namespace(client, spec)
    return sum(
        client.match(namespace, tree.full_chain(number)).matched_count for number in _asked(tree)
    )


def _asked(tree: ChainTree) -> range:
    """Some of the chains, evenly."""
    return range(0, tree.full_chain_count, max(1, tree.full_chain_count // _ASKED_CHAINS))


def _read(engine: Client, spec: NamespaceSpec, chain: list[bytes]) -> list[bytes]:
    """By the session that was there all the time; as soon as its calls pass again."""
    namespace = open_namespace(engine, spec)
    read: list[bytes] = []
    deadline = time.monotonic() + _ALL_SECONDS_MAX
    while len(read) < len(chain) and time.monotonic() < deadline:
        with contextlib.suppress(KVTierError):
            read = engine.get(namespace, chain)
        time.sleep(_POLL_SECONDS)
    return read


def _figures(rounds: list[_Round], tree: ChainTree, start_seconds: float) -> dict[str, object]:
    best = min(rounds, key=lambda one: one.ready_seconds)
    fastest = min(rounds, key=lambda one: one.all_seconds)
    asked_count = len(_asked(tree)) * tree.chain_length
    return {
        "ready_s": best.ready_seconds,
        "ready_median_s": measure.percentile([one.ready_seconds for one in rounds], 50),
        "ready_cpu_s": best.ready_cpu_seconds,
        "all_s": fastest.all_seconds,
        "all_cpu_s": fastest.all_cpu_seconds,
        "start_s": start_seconds,
        "found_share": min(one.found_count for one in rounds) / asked_count,
        "resident_blocks": tree.resident_count,
        "rounds": len(rounds),
    }
