"""`kvtier advise`: what more or less memory would be worth, from live traffic or from a trace."""

from __future__ import annotations

import argparse
import json
import math
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.cli.charts import Chart, draw
from kvtier.cli.output import add_json_argument, bytes_text, print_json, table
from kvtier.cli.simulate import add_trace_arguments, read_any
from kvtier.cli.sizes import size
from kvtier.errors import BadRequest, Unavailable
from kvtier.policy.hit_curve import HitCurve
from kvtier.policy.lru import LruPolicy
from kvtier.sim.machine import GIB, Machine
from kvtier.sim.replay import replay_policy
from kvtier.sim.traces import Trace

ADMIN = "127.0.0.1:9464"
ANSWER_SECONDS = 10.0
CHANGES = (0.5, 1.5, 2.0, 4.0)
NVME_TRIED = (4, 16)  # Times DRAM, where there is no NVMe tier.
SAMPLES_TRUSTED = 1000  # A size that fewer stand for is marked.
EXACT_SIZES = 8


@dataclass(frozen=True, slots=True)
class Advised:
    """A curve as it was told: (bytes, hit ratio, its error), ascending; what stands behind it."""

    tenant: str
    points: Sequence[tuple[float, float, float]]
    asked_tokens_per_hour: float
    rate: float
    samples: int

    def hit_ratio(self, memory_bytes: float) -> float:
        return self._at(memory_bytes, 1)

    def error(self, memory_bytes: float) -> float:
        """What chance may have added to the hit ratio or taken from it, as the sample tells."""
        return self._at(memory_bytes, 2)

    def _at(self, memory_bytes: float, column: int) -> float:
        """Between two points in proportion to the logarithm of the size."""
        if not self.points or memory_bytes < self.points[0][0]:
            return 0.0
        sizes = np.log([one[0] for one in self.points])
        return float(np.interp(math.log(memory_bytes), sizes, [one[column] for one in self.points]))


@dataclass(frozen=True, slots=True)
class Sizes:
    dram_bytes: int
    nvme_bytes: int
    block_bytes: int

    @property
    def kept_bytes(self) -> int:
        """NVMe keeps copies of what is in DRAM: together they hold as much as the larger."""
        return max(self.dram_bytes, self.nvme_bytes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser, optional=True)
    number = parser.add_argument
    number("--admin", default=ADMIN, help=f"address of a running daemon (default: {ADMIN})")
    number("--dram", type=size, help="size to compare with; default: the daemon's, or 64GiB")
    number("--nvme", type=size, help="likewise; default: the daemon's, or none")
    number("--bytes-per-token", type=int, default=Machine().bytes_per_token, help="of a trace")
    number("--sample", type=_share, default=1 / 16, help="of a trace; default: 1/16")
    number(
        "--prefill-rate",
        type=float,
        default=Machine().prefill_tokens_per_second,
        help="tokens that one GPU computes in a second (default: 20000)",
    )
    number("--no-exact", action="store_true", help="do not replay the trace to tell the error")
    number("--plot", type=Path, metavar="FOLDER", help="writes advice.svg there")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    errors: list[dict[str, Any]] = []
    if arguments.trace is None:
        sizes, curves = _ask(arguments)
    else:
        trace = read_any(arguments)
        block_bytes = trace.block_tokens * arguments.bytes_per_token
        sizes = Sizes(arguments.dram or 64 * GIB, arguments.nvme or 0, block_bytes)
        curve, curves = _sampled(trace, arguments.sample, block_bytes)
        if not arguments.no_exact:
            errors = _errors(trace, curve, block_bytes)
    if not curves or not curves[0].points:
        raise BadRequest("nothing was asked for twice yet: there is nothing to advise from")
    if len(curves) == 2:  # Of all, and of the only tenant that asked.
        curves = curves[:1]
    advice = {one.tenant: _advice(one, sizes, arguments.prefill_rate) for one in curves}
    if arguments.json:
        print_json({"advice": advice, "errors": errors})
    else:
        _tell(arguments, curves, sizes, advice, errors)
    if arguments.plot is not None:
        arguments.plot.mkdir(parents=True, exist_ok=True)
        lines = {
            one.tenant or "all": [(length, ratio) for length, ratio, _ in one.points]
            for one in curves
        }
        chart = Chart("hits of memory of any size (LRU)", "bytes", "hits", lines, bytes_text)
        (arguments.plot / "advice.svg").write_text(draw(chart), encoding="utf-8")
    return 0


def _ask(arguments: argparse.Namespace) -> tuple[Sizes, list[Advised]]:
    address = f"http://{arguments.admin}/advice.json"
    try:
        with urllib.request.urlopen(address, timeout=ANSWER_SECONDS) as answer:
            told = json.load(answer)
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        raise Unavailable(f"{address} does not answer ({error}): see admin.address") from None
    sizes = Sizes(
        arguments.dram or told["dram_bytes"],
        arguments.nvme or told["nvme_bytes"],
        told["block_bytes"],
    )
    return sizes, [
        Advised(
            one["tenant"],
            [(length, ratio, error) for length, ratio, error in one["points"]],
            one["asked_tokens_per_hour"],
            one["rate"],
            one["samples"],
        )
        for one in told["curves"]
    ]


def _sampled(trace: Trace, share: float, block_bytes: int) -> tuple[HitCurve, list[Advised]]:
    tenants = sorted({one.tenant for one in trace.requests})
    whole = HitCurve(rate=share, samples_max=trace.unique_count + 1)
    single = {one: HitCurve(rate=share, samples_max=trace.unique_count + 1) for one in tenants}
    for request in trace.requests:
        keys = request.blocks.astype("uint64")
        for curve in (whole, single[request.tenant]):
            curve.note(keys, request.at, block_bytes=block_bytes, block_tokens=trace.block_tokens)
    hours = max(1.0, trace.requests[-1].at - trace.requests[0].at) / 3600
    named = [("", whole)]
    if len(tenants) > 1:
        named += [(f"tenant {one}", curve) for one, curve in single.items()]
    return whole, [
        Advised(name, curve.points(), curve.asked_tokens / hours, curve.rate, curve.sample_count)
        for name, curve in named
    ]


def _errors(trace: Trace, curve: HitCurve, block_bytes: int) -> list[dict[str, Any]]:
    """At sizes up to all blocks, each twice the one before: the sample beside an exact replay."""
    found = []
    for step in reversed(range(EXACT_SIZES)):
        blocks = trace.unique_count >> step
        if not blocks:
            continue
        exact = replay_policy(trace, LruPolicy, blocks).hit_ratio
        estimated = curve.hit_ratio(blocks * block_bytes)
        found.append(
            {
                "bytes": blocks * block_bytes,
                "sampled_blocks": round(blocks * curve.rate),
                "exact": round(exact, 4),
                "estimated": round(estimated, 4),
                "error_points": round(100 * (estimated - exact), 2),
            }
        )
    return found


def _advice(curve: Advised, sizes: Sizes, prefill_rate: float) -> list[dict[str, Any]]:
    now = curve.hit_ratio(sizes.kept_bytes)
    now_dram = curve.hit_ratio(sizes.dram_bytes)
    found = [_row("now", sizes, curve, now, now_dram)]
    for text, other in _others(sizes):
        row = _row(text, other, curve, curve.hit_ratio(other.kept_bytes), 0.0)
        row["hit_ratio_dram"] = round(curve.hit_ratio(other.dram_bytes), 4)
        row["points"] = round(100 * (row["hit_ratio"] - now), 2)
        row["points_dram"] = round(100 * (row["hit_ratio_dram"] - now_dram), 2)
        more = (row["hit_ratio"] - now) * curve.asked_tokens_per_hour
        row["gpu_seconds_per_hour"] = round(more / prefill_rate, 1)
        found.append(row)
    return found


def _row(
    text: str, sizes: Sizes, curve: Advised, ratio: float, dram_ratio: float
) -> dict[str, Any]:
    sampled = sizes.dram_bytes / max(1, sizes.block_bytes) * curve.rate
    return {
        "change": text,
        "dram_bytes": sizes.dram_bytes,
        "nvme_bytes": sizes.nvme_bytes,
        "hit_ratio": round(ratio, 4),
        "error_points": round(100 * curve.error(sizes.kept_bytes), 2),
        "hit_ratio_dram": round(dram_ratio, 4),
        "points": 0.0,
        "points_dram": 0.0,
        "gpu_seconds_per_hour": 0.0,
        "is_trusted": curve.rate >= 1 or sampled >= SAMPLES_TRUSTED,
    }


def _others(sizes: Sizes) -> list[tuple[str, Sizes]]:
    dram, nvme, block = sizes.dram_bytes, sizes.nvme_bytes, sizes.block_bytes
    found = [
        (f"DRAM {_signed(int(dram * change) - dram)}", Sizes(int(dram * change), nvme, block))
        for change in CHANGES
    ]
    if nvme:
        return found + [
            (f"NVMe {100 * (change - 1):+.0f} %", Sizes(dram, int(nvme * change), block))
            for change in CHANGES
        ]
    return found + [
        (f"NVMe +{bytes_text(times * dram)}", Sizes(dram, times * dram, block))
        for times in NVME_TRIED
    ]


def _signed(length: int) -> str:
    return f"{'+' if length >= 0 else '-'}{bytes_text(abs(length))}"


def _tell(
    arguments: argparse.Namespace,
    curves: list[Advised],
    sizes: Sizes,
    advice: dict[str, list[dict[str, Any]]],
    errors: list[dict[str, Any]],
) -> None:
    out = sys.stdout.write
    for one in curves:
        out(
            f"{one.tenant or 'all requests'}: {one.asked_tokens_per_hour:,.0f} tokens asked for in "
            f"an hour; {one.samples:,} blocks sampled (1 of {1 / one.rate:.0f})\n"
        )
        rows = [
            (
                row["change"] + ("" if row["is_trusted"] else " *"),
                f"{100 * row['hit_ratio']:.1f} %",
                f"{row['error_points']:.1f}",
                f"{row['points']:+.1f}",
                f"{100 * row['hit_ratio_dram']:.1f} %",
                f"{row['points_dram']:+.1f}",
                f"{row['gpu_seconds_per_hour']:+,.0f}",
            )
            for row in advice[one.tenant]
        ]
        headings = ["", "hits", "±", "points", "in DRAM", "points", "GPU-seconds an hour"]
        out(table(headings, rows) + "\n")
    out("±: points that chance in the sample may have added or taken, as its parts differ.\n")
    out(f"GPU-seconds at {arguments.prefill_rate:,.0f} tokens/s of prefill (--prefill-rate).\n")
    if not all(row["is_trusted"] for rows in advice.values() for row in rows):
        out(f"* fewer than {SAMPLES_TRUSTED:,} sampled blocks stand for DRAM of this size.\n")
    if errors:
        out("error of the sample against an exact replay under LRU:\n")
        shown = [
            (
                bytes_text(one["bytes"]),
                f"{one['sampled_blocks']:,}",
                f"{one['exact']:.4f}",
                f"{one['estimated']:.4f}",
                f"{one['error_points']:+.2f}",
            )
            for one in errors
        ]
        out(table(["size", "sampled", "exact", "estimated", "points"], shown) + "\n")


def _share(text: str) -> float:
    """For argparse: "1/16" or "0.0625"."""
    try:
        above, slash, below = text.partition("/")
        share = float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError):
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write 1/16 or 0.0625")
    return share
