"""`kvtier stats`: what the daemon holds and what it has done.

With --watch it asks again and again: a table that is drawn anew, or with --json one line of JSON
each time. Exit codes: 0; 3 when no daemon answers.
"""

from __future__ import annotations

import argparse
import sys
import time

from kvtier.cli.connect import add_socket_argument, connected, tool_settings
from kvtier.cli.output import add_json_argument, bytes_text, plain, print_json, table
from kvtier.v1 import kvtier_pb2 as pb

_DRAM, _NVME = "dram", "nvme"
_CLEAR_SCREEN = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_socket_argument(parser)
    add_json_argument(parser)
    parser.add_argument(
        "--watch",
        type=_seconds,
        nargs="?",
        const=2.0,
        metavar="SECONDS",
        help="ask again every SECONDS (2) until interrupted",
    )


def run(arguments: argparse.Namespace) -> int:
    with connected(
        arguments.socket, name="kvtier stats", settings=tool_settings(arguments)
    ) as client:
        while True:  # Ends: without --watch after one turn, else when the user interrupts.
            stats = client.stats()
            if arguments.json:
                print_json(plain(stats), compact=arguments.watch is not None)
            else:
                screen = _CLEAR_SCREEN if arguments.watch and sys.stdout.isatty() else ""
                print(screen + text_of(stats), flush=True)
            if arguments.watch is None:
                return 0
            time.sleep(arguments.watch)


def text_of(stats: pb.StatsResponse) -> str:
    """For people."""
    state = "draining" if stats.draining else "ready"
    head = (
        f"kvtier {stats.daemon_version}, {state}, up {stats.uptime_seconds:.0f} s, "
        f"generation {stats.generation:016x}"
    )
    parts = [head, _tiers(stats), _hits(stats)]
    if any(tier.tier == _NVME for tier in stats.tiers):
        parts.insert(2, _nvme(stats))
    if eviction := _eviction(stats):
        parts.append(eviction)
    if stats.namespaces:
        parts.append(_namespaces(stats))
    parts.append(_sessions(stats))
    return "\n\n".join(parts)


def _tiers(stats: pb.StatsResponse) -> str:
    return table(
        ("tier", "budget", "populated", "pages", "slots", "free", "ready", "reserved", "pinned"),
        [
            (
                tier.tier,
                bytes_text(tier.budget_bytes),
                bytes_text(tier.populated_bytes),
                tier.page_kind or tier.memory or "-",
                tier.slot_count,
                # There slots are cut from segments when blocks come.
                tier.free_count if tier.tier == _DRAM else "-",
                tier.ready_count,
                tier.reserved_count,
                tier.pinned_count,
            )
            for tier in stats.tiers
        ],
    )


def _nvme(stats: pb.StatsResponse) -> str:
    """What the table of tiers has no place for."""

    def told(name: str) -> float:
        return stats.counters.get(f"kvtier_{name}", 0.0)

    free, bound = (told(f'nvme_segments{{state="{state}"}}') for state in ("free", "bound"))
    states = [
        name.split('"')[1]
        for name, value in stats.counters.items()
        if name.startswith("kvtier_nvme_state{") and value
    ]
    row = (
        " ".join(states) or "-",
        f"{free:.0f} of {free + bound:.0f}",
        f"{told('demote_waiting_blocks'):.0f}",
        bytes_text(int(told("nvme_day_written_bytes"))),
        bytes_text(int(told("nvme_day_endurance_bytes"))),
        bytes_text(int(told("nvme_write_budget_bytes"))),
    )
    heads = ("nvme", "segments free", "waiting", "written in 24 h", "endurance", "write budget")
    return table(heads, [row])


def _hits(stats: pb.StatsResponse) -> str:
    rows = []
    for call in ("match", "acquire", "get"):
        asked = stats.counters.get(f'kvtier_asked_blocks_total{{call="{call}"}}', 0.0)
        missed = stats.counters.get(f'kvtier_miss_blocks_total{{call="{call}"}}', 0.0)
        share = f"{100 * (asked - missed) / asked:.1f} %" if asked else "-"
        tiers = [f"{_hit_count(stats, call, tier.tier):.0f}" for tier in stats.tiers]
        rows.append((call, f"{asked:.0f}", f"{asked - missed:.0f}", share, *tiers))
    headings = ("call", "blocks asked for", "hits", "share")
    return table((*headings, *(f"in {tier.tier}" for tier in stats.tiers)), rows)


_ORDERS = {
    "learned": "by reuse curves",
    "by_age": "by age: the guard finds that better than the curves",
    "unguarded": "by reuse curves, unguarded: too few blocks to sample",
}


def _eviction(stats: pb.StatsResponse) -> str:
    """How namespaces evict whose policy learns; nothing where none does."""
    counts = {
        text: int(stats.counters.get(f'kvtier_eviction_order_count{{order="{order}"}}', 0))
        for order, text in _ORDERS.items()
    }
    found = [(text, count) for text, count in counts.items() if count]
    return table(("eviction", "namespaces"), found) if found else ""


def _hit_count(stats: pb.StatsResponse, call: str, tier: str) -> float:
    return stats.counters.get(f'kvtier_hit_blocks_total{{call="{call}",tier="{tier}"}}', 0.0)


def _namespaces(stats: pb.StatsResponse) -> str:
    return table(
        ("namespace", "model", "fingerprint", "blocks", "of bytes", "slots", "free"),
        [
            (
                one.namespace_id,
                one.model,
                one.fingerprint.hex()[:12],
                one.block_count,
                bytes_text(one.block_bytes),
                one.slot_count,
                one.free_count,
            )
            for one in stats.namespaces
        ],
    )


def _sessions(stats: pb.StatsResponse) -> str:
    return table(
        ("session", "name", "role", "state", "reserved", "leases", "engine"),
        [
            (
                one.session_id,
                one.name or "-",
                one.role,
                one.state,
                one.reserved_count,
                one.lease_count,
                one.engine_id.hex()[:8],
            )
            for one in stats.sessions
        ],
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("between 0.1 and 3600 seconds")
    return seconds
