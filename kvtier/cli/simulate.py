"""`kvtier simulate`: what a node would have done with a trace, in virtual time."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.cli.charts import Chart, cumulative, draw
from kvtier.cli.output import add_json_argument, bytes_text, print_json, table
from kvtier.cli.progress import Progress
from kvtier.cli.sizes import size
from kvtier.errors import BadRequest
from kvtier.server.policies import policy_named
from kvtier.sim.machine import GB, Machine
from kvtier.sim.recorded import SUFFIX, read_recording
from kvtier.sim.replay import replay_policy
from kvtier.sim.simulate import SimulationResult, simulate
from kvtier.sim.traces import Trace, read_sessions, read_trace, scope_of
from kvtier.types import TierName

HOUR = 3600.0
SEED = 1


def add_trace_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    parser.add_argument(
        "trace",
        type=Path,
        nargs="?" if optional else None,
        help="a trace (.jsonl.gz), or the first file of a recording (.kvrec)",
    )
    parser.add_argument(
        "--block-tokens", type=int, default=512, help="of session traces (default: 512)"
    )
    parser.add_argument(
        "--span-hours",
        type=float,
        default=24.0,
        help="time over which the sessions of a session trace begin (default: 24)",
    )


def read_any(arguments: argparse.Namespace) -> Trace:
    """A trace of either scope, or a recording."""
    path: Path = arguments.trace
    if path.suffix == SUFFIX:
        return read_recording(path)
    if scope_of(path) == "session":
        return read_sessions(path, arguments.block_tokens, arguments.span_hours * HOUR, seed=SEED)
    return read_trace(path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser)
    machine = Machine()
    number = parser.add_argument
    number("--dram", default="64GiB", help='"64GiB", or "5%%" of the different blocks asked for')
    number("--nvme", default="0", help='likewise; "0": no NVMe tier (default)')
    number("--policy", default="lru", help="eviction policy (default: lru)")
    number("--sweep", metavar="SIZES", help='DRAM sizes, as "1%%,5%%,25%%" or "16GiB,64GiB"')
    number("--policies", help="with --sweep: several, as lru,curves,arc")
    number(
        "--policy-only",
        action="store_true",
        help="hits in DRAM alone, without the core and its times: faster",
    )
    number("--bytes-per-token", type=int, default=machine.bytes_per_token)
    number("--engines", type=int, default=machine.engine_count)
    number("--prefill-rate", type=float, default=machine.prefill_tokens_per_second, help="tokens/s")
    number("--decode-rate", type=float, default=machine.decode_tokens_per_second, help="tokens/s")
    number("--dram-rate", type=float, default=machine.dram_bytes_per_second / GB, help="GB/s")
    number("--nvme-read-rate", type=float, default=machine.nvme_read_bytes_per_second / GB)
    number("--nvme-write-rate", type=float, default=machine.nvme_write_bytes_per_second / GB)
    number("--nvme-writes", type=size, help="bytes an hour; default: the pool once a day")
    number("--plot", type=Path, metavar="FOLDER", help="writes hits.svg and ttft.svg there")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    trace = read_any(arguments)
    gc.freeze()  # The trace stays, as in the daemon what it has begun with: not to be traversed.
    base = _machine(arguments, trace)
    sizes = (arguments.sweep or arguments.dram).split(",")
    policies = (arguments.policies or arguments.policy).split(",")
    machines = [replace(base, dram_bytes=_size(one, trace, base)) for one in sizes]
    rows = []
    ttfts: dict[str, list[float]] = {}
    progress = Progress("requests", len(trace.requests) * len(machines) * len(policies))
    for number, (policy, text, machine) in enumerate(_cases(policies, sizes, machines)):
        before = number * len(trace.requests)
        row: dict[str, Any] = {"policy": policy, "dram": text, "dram_bytes": machine.dram_bytes}
        if arguments.policy_only:
            blocks = machine.dram_bytes // (trace.block_tokens * machine.bytes_per_token)
            found = replay_policy(trace, policy_named(policy), blocks)
            row |= {"asked_blocks": found.asked_count, "hit_ratio": round(found.hit_ratio, 4)}
        else:
            result = simulate(
                trace,
                machine,
                policy_named(policy),
                lambda count, before=before: progress.show(before + count),  # type: ignore[misc]
            )
            row |= result.values()
            ttfts[f"{policy} {text}"] = result.ttft_seconds
        progress.show(before + len(trace.requests))
        rows.append(row)
    progress.end()
    _tell(arguments, trace, rows)
    if arguments.plot is not None:
        _plot(arguments.plot, trace, rows, ttfts)
    return 0


def _cases(
    policies: list[str], sizes: list[str], machines: list[Machine]
) -> Iterator[tuple[str, str, Machine]]:
    for policy in policies:
        for text, machine in zip(sizes, machines, strict=True):
            yield policy, text, machine


def _machine(arguments: argparse.Namespace, trace: Trace) -> Machine:
    for name in ("bytes_per_token", "engines", "prefill_rate", "decode_rate", "dram_rate"):
        if getattr(arguments, name) <= 0:
            raise BadRequest(f"--{name.replace('_', '-')} must be above 0")
    machine = Machine(
        bytes_per_token=arguments.bytes_per_token,
        engine_count=arguments.engines,
        prefill_tokens_per_second=arguments.prefill_rate,
        decode_tokens_per_second=arguments.decode_rate,
        dram_bytes_per_second=arguments.dram_rate * GB,
        nvme_read_bytes_per_second=arguments.nvme_read_rate * GB,
        nvme_write_bytes_per_second=arguments.nvme_write_rate * GB,
    )
    if arguments.nvme_writes is not None:
        machine = replace(machine, nvme_write_bytes_per_hour=float(arguments.nvme_writes))
    if arguments.nvme == "0":
        return machine
    return replace(machine, nvme_bytes=_size(arguments.nvme, trace, machine))


def _size(text: str, trace: Trace, machine: Machine) -> int:
    """Bytes; of a percentage, whole blocks."""
    if not text.endswith("%"):
        try:
            return size(text)
        except argparse.ArgumentTypeError as error:
            raise BadRequest(str(error)) from None
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        raise BadRequest(f'{text!r} is no size: write "5%" or "64GiB"') from None
    blocks = int(trace.unique_count * share)
    return blocks * trace.block_tokens * machine.bytes_per_token


def _tell(arguments: argparse.Namespace, trace: Trace, rows: list[dict[str, Any]]) -> None:
    if arguments.json:
        print_json(
            {
                "trace": trace.name,
                "requests": len(trace.requests),
                "asked_blocks": trace.access_count,
                "different_blocks": trace.unique_count,
                "block_tokens": trace.block_tokens,
                "results": rows,
            }
        )
        return
    sys.stdout.write(
        f"{trace.name}: {len(trace.requests):,} requests for {trace.access_count:,} blocks of "
        f"{trace.block_tokens} tokens, {trace.unique_count:,} different ones\n"
    )
    if arguments.policy_only:
        short = [(row["policy"], row["dram"], f"{row['hit_ratio']:.4f}") for row in rows]
        sys.stdout.write(table(["policy", "DRAM", "hits"], short) + "\n")
        return
    headings = ["policy", "DRAM", "hits", "of DRAM", "of NVMe", "TTFT p50", "p90", "p99"]
    headings += ["NVMe written", "a day", "prefill busy", "out tokens/s"]
    sys.stdout.write(table(headings, map(_row, rows)) + "\n")


def _row(row: dict[str, Any]) -> list[str]:
    tiers, ttft = row["hit_ratio_by_tier"], row["ttft_seconds"]
    return [
        *(row["policy"], row["dram"], f"{row['hit_ratio']:.4f}"),
        *(f"{tiers.get(tier, 0.0):.4f}" for tier in (TierName.DRAM, TierName.NVME)),
        *(f"{ttft[name]:.3f} s" for name in ("p50", "p90", "p99")),
        bytes_text(row["nvme_written_bytes"]),
        bytes_text(row["nvme_written_bytes_per_day"]),
        f"{100 * row['prefill_busy_ratio']:.1f} %",
        f"{row['output_tokens_per_second']:,.0f}",
    ]


def _plot(
    folder: Path, trace: Trace, rows: list[dict[str, Any]], ttfts: dict[str, list[float]]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row["policy"], []).append((row["dram_bytes"], row["hit_ratio"]))
    for line in lines.values():
        line.sort()
    hits = Chart(f"{trace.name}: prefix hits", "DRAM", "hits", lines, x_text=bytes_text)
    (folder / "hits.svg").write_text(draw(hits), encoding="utf-8")
    if ttfts:
        shares = {name: cumulative(values) for name, values in ttfts.items()}
        ttft = Chart(f"{trace.name}: time to first token", "s", "share of requests", shares)
        (folder / "ttft.svg").write_text(draw(ttft), encoding="utf-8")


__all__ = ["SimulationResult", "add_arguments", "run"]
