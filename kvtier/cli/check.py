"""`kvtier check`: verify the invariants of a running daemon.

Exit codes: 0 when all hold, 1 when some are violated, 3 when no daemon answers.
"""

from __future__ import annotations

import argparse

from kvtier.cli.connect import add_socket_argument, connected, tool_settings
from kvtier.cli.output import add_json_argument, plain, print_json

EXIT_VIOLATED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_socket_argument(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    with connected(
        arguments.socket, name="kvtier check", settings=tool_settings(arguments)
    ) as client:
        answer = client.check()
    violations = list(answer.violations)
    if arguments.json:
        print_json(plain(answer))
    elif violations:
        print("\n".join(violations))
        print(f"{len(violations)} invariants do not hold: please report this with the log")
    else:
        print(f"all invariants hold ({answer.block_count} blocks, {answer.check_us / 1000:.1f} ms)")
    return EXIT_VIOLATED if violations else 0
