"""`kvtier bench policy`: what reuse curves cost the daemon beyond LRU, at 10,000 blocks a second.

Two daemons, one with `lru` and one with `curves`, each with engines that are processes and play the
same conversations at a rate of touched blocks: match, acquire, release, reserve, commit, in a pool
that is full. They play in turns, and of each turn the daemon's processor time is taken, of all its
threads: calls, sockets and refits are in it.

By --block-tokens N, for each of them:

    core_percent_N        processor time of `curves` less that of `lru`, in percent of one core at
                          10,000 touched blocks a second; of all turns together
    core_percent_turns_N  the same of each pair of turns
    POLICY_us_N           processor time a touched block, in microseconds
    POLICY_hit_ratio_N    leased blocks over blocks asked for
    POLICY_order_N        how a policy that learns evicted at the end
    POLICY_rate_N         blocks a second that were reached; where they are far fewer, the machine
                          was busy, and processor time a block is more than on a quiet one
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvtier.cli import bench_run, measure
from kvtier.cli.bench_fill import SLOT_BYTES
from kvtier.cli.connect import connected
from kvtier.cli.output import say
from kvtier.cli.peer import Peer, started_peer
from kvtier.cli.private_daemon import BenchDaemon, private_daemon
from kvtier.cli.processes import cpu_seconds
from kvtier.cli.sizes import positive
from kvtier.errors import KVTierError
from kvtier.policy.eviction import EvictionOrder
from kvtier.v1 import kvtier_pb2 as pb

CORE_PERCENT_MAX = 5.0
RATE = 10_000  # Touched blocks a second, for which the target is.
_POLICIES = ("lru", "curves")
_SLAB_BYTES = 2 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--block-tokens", type=positive, nargs="+", default=[16, 512], help="of a block (16 512)"
    )
    parser.add_argument(
        "--rate", type=positive, default=RATE, help=f"touched blocks a second ({RATE})"
    )
    parser.add_argument("--turns", type=positive, default=40, help="of each daemon (40)")
    parser.add_argument("--turn-seconds", type=positive, default=2, help="(2)")
    parser.add_argument(
        "--warm-turns", type=positive, default=20, help="before them, to fill and to learn (20)"
    )
    parser.add_argument("--engines", type=positive, default=2, help="of each daemon (2)")
    parser.add_argument("--pool-blocks", type=positive, default=32_768, help="(32768)")
    parser.add_argument("--seed", type=int, default=1)


@dataclass(slots=True)
class _Side:
    """One policy's daemon with its engines."""

    daemon: BenchDaemon
    engines: list[Peer]
    counts: Counter[str] = field(default_factory=Counter)
    turn_us: list[float] = field(default_factory=list)  # A touched block, by turn.
    cpu_seconds: float = 0.0
    seconds: float = 0.0

    def play(self, seconds: int, rate: int) -> None:
        before, began = cpu_seconds(self.daemon.pid), time.monotonic()
        for engine in self.engines:
            engine.order("play", seconds=seconds, blocks_per_second=rate / len(self.engines))
        counts: Counter[str] = Counter()
        for engine in self.engines:
            told = engine.answer()["counts"]
            if not isinstance(told, dict):
                raise KVTierError("an engine's answer is damaged")
            counts.update(told)
        cpu = cpu_seconds(self.daemon.pid) - before
        self.turn_us.append(1e6 * cpu / max(1, counts["touched_blocks"]))
        self.cpu_seconds += cpu
        self.seconds += time.monotonic() - began
        self.counts.update(counts)

    def forget(self) -> None:
        self.counts.clear()
        self.turn_us.clear()
        self.cpu_seconds = self.seconds = 0.0

    @property
    def us(self) -> float:
        return 1e6 * self.cpu_seconds / self.counts["touched_blocks"]


def run(arguments: argparse.Namespace) -> int:
    figures: dict[str, object] = {}
    targets: dict[str, measure.Target] = {}
    violations: list[str] = []
    for block_tokens in arguments.block_tokens:
        found, wrong = _measure(arguments, block_tokens)
        figures |= {f"{name}_{block_tokens}": figure for name, figure in found.items()}
        targets[f"core_percent_{block_tokens}"] = measure.Target(at_most=CORE_PERCENT_MAX)
        violations += wrong
    figures["violations"] = violations
    figures["violation_count"] = len(violations)
    names = ("block_tokens", "rate", "turns", "turn_seconds", "engines", "pool_blocks")
    figures["settings"] = {name: getattr(arguments, name) for name in names}
    return bench_run.report(arguments, figures, targets, is_wrong=bool(violations))


def _measure(
    arguments: argparse.Namespace, block_tokens: int
) -> tuple[dict[str, object], list[str]]:
    """(figures, violated invariants)"""
    with ExitStack() as stack:
        sides = {name: _side(stack, name, arguments, block_tokens) for name in _POLICIES}
        say(f"blocks of {block_tokens} tokens: {arguments.warm_turns} turns to warm up")
        _play(sides, arguments.warm_turns, arguments)
        for side in sides.values():
            side.forget()
        say(f"{arguments.turns} turns of {arguments.turn_seconds} s each")
        _play(sides, arguments.turns, arguments)
        figures = _figures(sides)
        violations: list[str] = []
        for name, side in sides.items():
            with connected(side.daemon.socket, name="bench policy") as client:
                violations += client.check().violations
                stats = client.stats()
                evicted = bench_run.counter(stats, "kvtier_evicted_blocks_total")
                figures[f"{name}_evicted_blocks"] = evicted
                figures[f"{name}_order"] = ", ".join(_orders(stats))
    return figures, violations


def _orders(stats: pb.StatsResponse) -> list[str]:
    """By which orders a policy that learns evicts; nothing is told of others."""
    name = "kvtier_eviction_order_count"
    return [
        order.value
        for order in EvictionOrder
        if stats.counters.get(f'{name}{{order="{order.value}"}}', 0)
    ]


def _side(stack: ExitStack, policy: str, arguments: argparse.Namespace, block_tokens: int) -> _Side:
    # As small as may be, in whole slabs.
    slabs = -(-arguments.pool_blocks * SLOT_BYTES // _SLAB_BYTES)
    slot_bytes = slabs * _SLAB_BYTES // arguments.pool_blocks // SLOT_BYTES * SLOT_BYTES
    options = {
        "dram.bytes": str(slabs * _SLAB_BYTES),
        "dram.slab_bytes": str(_SLAB_BYTES),
        "dram.policy": policy,
    }
    daemon = stack.enter_context(private_daemon(options))
    engines = [
        stack.enter_context(started_peer("kvtier.cli.policy_play"))
        for _ in range(arguments.engines)
    ]
    salt = secrets.token_hex(8)
    for number, engine in enumerate(engines):
        engine.order(
            "open",
            socket=str(daemon.socket),
            block_tokens=block_tokens,
            slot_bytes=slot_bytes,
            salt=salt,
            seed=arguments.seed + number,
        )
    for engine in engines:
        engine.answer()
    return _Side(daemon, engines)


def _play(sides: dict[str, _Side], turns: int, arguments: argparse.Namespace) -> None:
    """In turns; who goes first alternates."""
    names = list(_POLICIES)
    for _ in range(turns):
        for name in names:
            sides[name].play(arguments.turn_seconds, arguments.rate)
        names.reverse()


def _figures(sides: dict[str, _Side]) -> dict[str, object]:
    lru, curves = sides["lru"], sides["curves"]
    # A microsecond a block is a percent of a core at 10,000 blocks a second.
    percent_of_us = RATE / 1e6 * 100
    figures: dict[str, object] = {
        "core_percent": (curves.us - lru.us) * percent_of_us,
        "core_percent_turns": [
            (mine - base) * percent_of_us
            for mine, base in zip(curves.turn_us, lru.turn_us, strict=True)
        ],
    }
    for name, side in sides.items():
        touched = side.counts["touched_blocks"]
        figures[f"{name}_us"] = side.us
        figures[f"{name}_hit_ratio"] = side.counts["hit_blocks"] / touched
        figures[f"{name}_rate"] = touched / side.seconds
        figures[f"{name}_requests"] = side.counts["requests"]
        figures[f"{name}_refused_blocks"] = side.counts["refused_blocks"]
    return figures
