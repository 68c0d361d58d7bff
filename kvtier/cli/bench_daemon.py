"""`kvtier bench daemon`: what it costs to have a daemon.

start_s             from spawning the process to its READY line; median
rss_mib             resident memory without pool and slot table (memfds): RssAnon + RssFile,
                    when the pool stands and a client has come and gone
idle_core_percent   processor time of all threads over a span without calls, of one core
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from kvtier.cli import bench_run, measure
from kvtier.cli.connect import connected
from kvtier.cli.output import say
from kvtier.cli.private_daemon import BenchDaemon, private_daemon
from kvtier.cli.processes import cpu_seconds, memory_of
from kvtier.cli.sizes import positive, size
from kvtier.errors import TierFull

TARGETS = {
    "start_s": measure.Target(at_most=1.0),
    "rss_mib": measure.Target(at_most=120.0),
    "idle_core_percent": measure.Target(at_most=0.3),
}
_SETTLE_SECONDS = 1.0
_WAIT_TRIES = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--starts", type=positive, default=5, help="daemons started (5)")
    parser.add_argument(
        "--idle-seconds", type=positive, default=15, help="length of the idle span (15)"
    )
    parser.add_argument(
        "--pool-bytes", type=size, default=512 << 20, help="of the private daemons (512MiB)"
    )


def run(arguments: argparse.Namespace) -> int:
    # All that a daemon does by default, its HTTP port included.
    options = {"dram.bytes": str(arguments.pool_bytes), "admin.address": "127.0.0.1:0"}
    starts = [] if arguments.socket else [_start_seconds(options) for _ in range(arguments.starts)]
    if starts:
        say("started in " + ", ".join(f"{seconds:.2f}" for seconds in starts) + " s")
    with bench_run.bench_daemon(arguments, options) as daemon:
        page_kind = _wait_populated(daemon)
        time.sleep(_SETTLE_SECONDS)
        memory = memory_of(daemon.pid)
        idle = _idle_core_percent(daemon.pid, arguments.idle_seconds)
    figures: dict[str, object] = {
        "rss_mib": memory.own_bytes / 2**20,
        "idle_core_percent": idle,
        "anonymous_mib": memory.anonymous_bytes / 2**20,
        "file_mib": memory.file_bytes / 2**20,
        "pool_mib": memory.shared_bytes / 2**20,
        "idle_seconds": arguments.idle_seconds,
    }
    targets = dict(TARGETS)
    if starts:
        figures = {"start_s": median(starts), "start_all_s": starts, **figures}
    else:
        del targets["start_s"]  # A running daemon has started before.
    return bench_run.report(arguments, figures, targets, page_kind=page_kind)


def _start_seconds(options: dict[str, str]) -> float:
    with private_daemon(options) as daemon:
        return daemon.start_seconds


def _wait_populated(daemon: BenchDaemon) -> str:
    """Until the pool stands; what pages it lies on."""
    with connected(daemon.socket, name="bench daemon") as client:
        for _ in range(_WAIT_TRIES):
            tier = client.stats().tiers[0]
            if tier.populated_bytes >= tier.budget_bytes:
                return tier.page_kind
            time.sleep(0.05)
    raise TierFull("the daemon's pool was not populated in time")


def _idle_core_percent(pid: int, span_seconds: int) -> float:
    say(f"idle for {span_seconds} s")
    before, started = cpu_seconds(pid), time.monotonic()
    time.sleep(span_seconds)
    return 100 * (cpu_seconds(pid) - before) / (time.monotonic() - started)
