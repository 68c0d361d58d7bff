"""What all benchmarks share: their daemon, their options and their report."""

from __future__ import annotations

import argparse
import contextlib
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvtier.cli import environment, measure
from kvtier.cli.output import add_json_argument, print_json, say, table
from kvtier.cli.private_daemon import BenchDaemon, private_daemon
from kvtier.errors import KVTierError, Unavailable
from kvtier.v1 import kvtier_pb2 as pb

EXIT_WRONG = 1
_CREDENTIALS = struct.Struct("3i")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket", type=Path, metavar="PATH", help="measure this running daemon, not a private one"
    )
    add_report_arguments(parser)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of a benchmark that needs no daemon."""
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    add_json_argument(parser)


@contextlib.contextmanager
def bench_daemon(
    arguments: argparse.Namespace, options: Mapping[str, str]
) -> Iterator[BenchDaemon]:
    """The daemon that --socket names, else a private one with these options."""
    if arguments.socket is not None:
        yield BenchDaemon(arguments.socket, pid_behind(arguments.socket), float("nan"))
        return
    with private_daemon(options) as daemon:
        say(f"private daemon ready after {daemon.start_seconds:.2f} s (process {daemon.pid})")
        yield daemon


def pid_behind(path: Path) -> int:
    """The process that listens on a session socket; Unavailable when nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(str(path))
        except OSError as error:
            raise Unavailable(f"no daemon at {path}: {error.strerror}") from None
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(raw)[0]
    return pid


def counter(stats: pb.StatsResponse, name: str) -> float:
    """A figure of the daemon's own; a map of protobuf would answer 0 for a wrong name."""
    if name not in stats.counters:
        raise KVTierError(f"the daemon tells no {name}: run the benchmark of its own version")
    return stats.counters[name]


def report(
    arguments: argparse.Namespace,
    figures: Mapping[str, object],
    targets: Mapping[str, measure.Target],
    *,
    page_kind: str = "",
    is_wrong: bool = False,
) -> int:
    """Print the figures and what they mean; the exit code."""
    judged = measure.judge(figures, targets)
    if arguments.json:
        print_json(
            {
                "bench": arguments.bench,
                **figures,
                "targets": judged,
                "environment": environment.describe(page_kind),
            }
        )
    else:
        print(_text(figures, targets))
    is_missed = arguments.strict and not measure.all_met(judged)
    return EXIT_WRONG if is_wrong or is_missed else 0


def _text(figures: Mapping[str, object], targets: Mapping[str, measure.Target]) -> str:
    rows = []
    for name, figure in figures.items():
        if isinstance(figure, Mapping | list | tuple):
            continue  # For the JSON.
        target = targets.get(name)
        rows.append((name, _figure_text(figure), *_target_text(target, figure)))
    return table(("figure", "value", "target", ""), rows)


def _figure_text(figure: object) -> str:
    return f"{figure:.4g}" if isinstance(figure, float) else str(figure)


def _target_text(target: measure.Target | None, figure: object) -> tuple[str, str]:
    if target is None or not isinstance(figure, int | float):
        return "", ""
    word = "met" if target.is_met(figure) else "MISSED"
    if target.at_most is not None:
        return f"<= {target.at_most:g}", word
    return f">= {target.at_least:g}", word
