"""`kvtier bench churn`: engines with more conversations than the pool has room for.

Each engine is a process that plays turns of conversations (a few are popular): match, acquire what
is resident, read it, release; reserve slots for the rest, write, commit (one turn in ten aborts;
one in twenty ends the conversation with a hint). What is read is compared with what must be there.
At the end the daemon checks its invariants, and nothing may be held any more.

    calls_per_second   of all engines together
    hit_ratio          resident blocks over blocks asked for, at the match
    CALL_p50_ms, CALL_p99_ms
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections import Counter
from contextlib import ExitStack

from kvtier.cli import bench_run, measure
from kvtier.cli.churn_play import CALLS
from kvtier.cli.connect import connected
from kvtier.cli.output import say
from kvtier.cli.peer import Order, started_peer
from kvtier.cli.sizes import positive, size
from kvtier.client.client import Client
from kvtier.errors import KVTierError

TARGETS: dict[str, measure.Target] = {}
_RETURN_TRIES = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=positive, default=20, help="how long (20)")
    parser.add_argument("--engines", type=positive, default=4, help="client processes (4)")
    parser.add_argument("--conversations", type=positive, default=2_000, help="(2000)")
    parser.add_argument("--blocks", type=positive, default=64, help="of a conversation (64)")
    parser.add_argument(
        "--block-bytes", type=size, default=8 << 10, metavar="SIZE", help="of a block (8KiB)"
    )
    parser.add_argument(
        "--pool-bytes", type=size, default=64 << 20, help="of the private daemon (64MiB)"
    )
    parser.add_argument("--seed", type=int, default=1)


def run(arguments: argparse.Namespace) -> int:
    options = {
        "dram.bytes": str(arguments.pool_bytes),
        "dram.slab_bytes": str(max(2 << 20, arguments.pool_bytes // 8 // 2**21 * 2**21)),
    }
    with bench_run.bench_daemon(arguments, options) as daemon:
        answers = _play(arguments, str(daemon.socket))
        with connected(daemon.socket, name="bench churn") as client:
            violations = _wait_returned(client)
            stats = client.stats()
    figures = _figures(answers, arguments.seconds)
    figures["evicted_blocks"] = bench_run.counter(stats, "kvtier_evicted_blocks_total")
    figures["core_long_slices"] = bench_run.counter(stats, "kvtier_core_long_slices_total")
    figures["violations"] = violations
    figures["violation_count"] = len(violations)
    figures["settings"] = {
        name: getattr(arguments, name)
        for name in ("seconds", "engines", "conversations", "blocks", "block_bytes", "pool_bytes")
    }
    is_wrong = bool(violations) or figures["wrong_blocks"] != 0
    page_kind = stats.tiers[0].page_kind
    return bench_run.report(arguments, figures, TARGETS, page_kind=page_kind, is_wrong=is_wrong)


def _play(arguments: argparse.Namespace, socket: str) -> list[Order]:
    """What every engine has to tell at the end."""
    salt = secrets.token_hex(8)
    with ExitStack() as stack:
        peers = [
            stack.enter_context(started_peer("kvtier.cli.churn_play"))
            for _ in range(arguments.engines)
        ]
        for number, peer in enumerate(peers):
            peer.order(
                "open",
                socket=socket,
                salt=salt,
                block_bytes=arguments.block_bytes,
                conversations=arguments.conversations,
                blocks=arguments.blocks,
                seed=arguments.seed + number,
            )
        for peer in peers:
            peer.answer()
        say(f"{arguments.engines} engines play for {arguments.seconds} s")
        for peer in peers:
            peer.order("play", seconds=arguments.seconds)
        return [peer.answer() for peer in peers]


def _wait_returned(client: Client) -> list[str]:
    """Violations, with what is still held once the engines have gone."""
    for _ in range(_RETURN_TRIES):
        tier = client.stats().tiers[0]
        held_count = tier.reserved_count + tier.pinned_count + tier.held_count
        if not held_count:
            return list(client.check().violations)
        time.sleep(0.05)
    return [f"{held_count} slots are held though no engine is there", *client.check().violations]


def _figures(answers: list[Order], seconds: int) -> dict[str, object]:
    counts: Counter[str] = Counter()
    times: dict[str, list[float]] = {name: [] for name in CALLS}
    for answer in answers:
        told, samples = answer["counts"], answer["times_ms"]
        if not isinstance(told, dict) or not isinstance(samples, dict):
            raise KVTierError("an engine's answer is damaged")
        counts.update(told)
        for name in CALLS:
            times[name] += samples[name]
    asked = counts["asked_blocks"]
    figures: dict[str, object] = {
        "calls_per_second": sum(counts[name] for name in CALLS) / seconds,
        "turns_per_second": counts["turns"] / seconds,
        "hit_ratio": counts["hit_blocks"] / asked if asked else 0.0,
        "wrong_blocks": counts["wrong_blocks"],
        "read_blocks": counts["read_blocks"],
        "committed_blocks": counts["committed_blocks"],
        "failed_calls": counts["failed_calls"],
    }
    for name in CALLS:
        if times[name]:
            figures[f"{name}_p50_ms"] = measure.percentile(times[name], 50)
            figures[f"{name}_p99_ms"] = measure.percentile(times[name], 99)
    return figures
