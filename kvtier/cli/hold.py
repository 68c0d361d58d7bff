"""`kvtier hold`: keep a daemon's memory while it is restarted."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.server import holder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("socket", type=Path, metavar="SOCKET", help="where restart.holder looks")
    parser.add_argument(
        "--count-max",
        type=int,
        default=holder.COUNT_MAX,
        metavar="N",
        help="file descriptors kept at once: one a slab, one a process (%(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        return holder.hold(arguments.socket.expanduser(), count_max=arguments.count_max)
    except OSError as error:
        raise ConfigError(f"cannot listen at {arguments.socket}: {error}") from None
