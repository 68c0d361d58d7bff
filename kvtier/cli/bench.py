"""`kvtier bench BENCH`: measure. BENCH is one of match, transfer, daemon, churn, policy, nvme,
recovery, restart and tiers.

The first four start a private daemon and remove it afterwards, unless --socket names a running one;
`restart` has one that it kills, `policy` two of its own, the others need none. They work in files
of their own, which they remove.
Progress goes to stderr. Exit codes: 0; 1 when something was wrong (bytes, invariants) or, with
--strict, a target was missed; 2 for a mistake in the arguments; 3 when no daemon answers.
"""

from __future__ import annotations

import argparse

from kvtier.cli import (
    bench_churn,
    bench_daemon,
    bench_match,
    bench_nvme,
    bench_policy,
    bench_recovery,
    bench_restart,
    bench_tiers,
    bench_transfer,
)
from kvtier.cli.bench_run import add_common_arguments, add_report_arguments

_BENCHES = {
    "match": (bench_match, "time of a match against a million resident blocks"),
    "transfer": (bench_transfer, "offload and onboard speed against memcpy"),
    "daemon": (bench_daemon, "start, memory and idle processor time"),
    "churn": (bench_churn, "many clients, little room: calls a second, hits, invariants"),
    "policy": (bench_policy, "processor time of eviction by reuse curves, beside LRU's"),
    "nvme": (bench_nvme, "the NVMe tier's own path against fio, on a file beside your data"),
    "recovery": (bench_recovery, "time to read the slot table of a large NVMe pool"),
    "restart": (bench_restart, "time to have a million blocks in memory again after a kill"),
    "tiers": (bench_tiers, "every tier beside its raw medium or its engine's own client"),
}
_WITHOUT_DAEMON = {"policy", "nvme", "recovery", "restart", "tiers"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    for name, (module, summary) in _BENCHES.items():
        child = benches.add_parser(name, help=summary, description=summary)
        (add_report_arguments if name in _WITHOUT_DAEMON else add_common_arguments)(child)
        module.add_arguments(child)
        child.set_defaults(run_bench=module.run)


def run(arguments: argparse.Namespace) -> int:
    exit_code: int = arguments.run_bench(arguments)
    return exit_code
