"""`kvtier`: finds the subcommand's module, imports only that, runs it.

A subcommand's module has two functions: `add_arguments(parser)` and `run(arguments) -> int`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from kvtier.errors import BadRequest, ConfigError, KVTierError, Unavailable
from kvtier.version import VERSION

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_OUTPUT_CLOSED = 141  # As a shell tells of a program that SIGPIPE ended.


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: where it lives and what `kvtier --help` says of it."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("kvtier.cli.serve", "run the daemon"),
    "hold": Command("kvtier.cli.hold", "keep a daemon's memory while it is restarted"),
    "stats": Command("kvtier.cli.stats", "show what a daemon holds and has done"),
    "top": Command("kvtier.cli.top", "watch a daemon in the terminal"),
    "check": Command("kvtier.cli.check", "verify the invariants of a running daemon"),
    "purge": Command("kvtier.cli.purge", "make an end of all that a tenant or a namespace has"),
    "explain": Command("kvtier.cli.explain", "say where a prefix is, or why it is not there"),
    "put": Command("kvtier.cli.put", "put a file into a daemon; prints its receipt"),
    "get": Command("kvtier.cli.get", "write a file from its receipt"),
    "match": Command("kvtier.cli.match", "say how much of a file is resident"),
    "list": Command("kvtier.cli.list_blocks", "list the resident blocks, each with its tiers"),
    "format": Command("kvtier.cli.format", "make an NVMe pool of files or devices"),
    "key": Command("kvtier.cli.key", "make a key for the NVMe or the remote tier"),
    "fsck": Command("kvtier.cli.fsck", "verify every block of an NVMe pool that is not in use"),
    "probe": Command("kvtier.cli.probe", "say what this machine has, and propose a configuration"),
    "size": Command("kvtier.cli.size", "say how much KV a model has and what a tier holds of it"),
    "replay": Command("kvtier.cli.replay", "make a recorded daemon's decisions again"),
    "simulate": Command("kvtier.cli.simulate", "say what a node would have done with a trace"),
    "advise": Command("kvtier.cli.advise", "say what more or less memory would be worth"),
    "engine": Command("kvtier.engine.http.command", "serve a model by the reference engine"),
    "bench": Command("kvtier.cli.bench", "measure a daemon"),
    "selftest": Command("kvtier.cli.selftest", "try your own engine with and without kvtier"),
}


def main(argv: Sequence[str] | None = None) -> int:
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has enough (`| head`). What is left in the buffers goes nowhere,
        # or Python complains about it at the exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        return EXIT_OUTPUT_CLOSED


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if word in COMMANDS), None)
    parser, run = _parser(chosen)
    arguments = parser.parse_args(words)
    if run is None:
        parser.print_help()
        return EXIT_USAGE
    try:
        return run(arguments)
    except ConfigError as error:
        return _fail(error, EXIT_USAGE)
    except BadRequest as error:
        # Its subclasses are about the protocol: no words of the user's would mend those.
        return _fail(error, EXIT_USAGE if type(error) is BadRequest else EXIT_FAILED)
    except Unavailable as error:
        return _fail(error, EXIT_UNAVAILABLE)
    except KVTierError as error:
        return _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return 130


Runner = Callable[[argparse.Namespace], int]


def _parser(chosen: str | None) -> tuple[argparse.ArgumentParser, Runner | None]:
    """The parser with every command's name, but the arguments of the chosen one only."""
    parser = argparse.ArgumentParser(
        prog="kvtier",
        description="Keeps the KV cache of LLM engines alive outside GPU memory.",
        epilog="Exit codes: 0; 1 it failed, or something checked is wrong; 2 a mistake in the "
        "arguments or the configuration; 3 no daemon answers, or no engine starts (selftest); 130 "
        "interrupted; 141 the reader of the output has gone. With --json, standard output is JSON "
        "alone; messages go to standard error.",
    )
    parser.add_argument("--version", action="version", version=f"kvtier {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run: Runner | None = None
    for name, command in COMMANDS.items():
        child = commands.add_parser(name, help=command.summary, description=command.summary)
        if name == chosen:
            module = importlib.import_module(command.module)
            module.add_arguments(child)
            run = cast(Runner, module.run)
    return parser, run


def _fail(error: KVTierError, exit_code: int) -> int:
    sys.stderr.write(f"kvtier: {type(error).__name__}: {error}\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
