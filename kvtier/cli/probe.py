"""`kvtier probe`: what this machine has for tiers, and a configuration file for it.

Reads /sys and /proc, asks no daemon and opens no device; with --measure it also copies some memory
and reads some of each disk. Exit codes: 0; 2 a mistake in the arguments, or a file that cannot be
written.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from kvtier.cli.machine import Machine, read_machine
from kvtier.cli.machine_proposal import Proposal, propose
from kvtier.cli.machine_text import machine_text
from kvtier.cli.output import add_json_argument, print_json, say
from kvtier.errors import BadRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the configuration here; a new file only"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also how fast memory is copied and disks are read (reading a disk needs root)",
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="read DIR/sys and DIR/proc, such as copies of another machine's",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.measure and arguments.root != Path("/"):
        raise BadRequest("--measure measures this machine: leave --root out")
    machine = read_machine(arguments.root)
    proposal = propose(machine)
    measured: dict[str, object] = {}
    if arguments.measure:
        from kvtier.cli.machine_measure import measure  # Late: it needs numpy.

        measured = measure(machine)
    if arguments.write is not None:
        _write(arguments.write, proposal)
    if arguments.json:
        print_json(_document(machine, proposal, measured))
    else:
        print(machine_text(machine, measured))
        print()
        print(proposal.toml(), end="")
    if arguments.write is not None:
        say(f"written to {arguments.write}: kvtier serve --config {arguments.write}")
    return 0


def _write(path: Path, proposal: Proposal) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(proposal.toml())
    except FileExistsError:
        raise BadRequest(f"{path} exists already: give the name of a new file") from None
    except OSError as error:
        raise BadRequest(f"cannot write {path}: {error.strerror}") from None


def _document(
    machine: Machine, proposal: Proposal, measured: dict[str, object]
) -> dict[str, object]:
    found = asdict(machine)
    for device in found["dax_devices"]:
        device["path"] = str(device["path"])
    for node, described in zip(machine.nodes, found["nodes"], strict=True):
        described["distances"] = {str(other): distance for other, distance in node.distances}
        described["has_only_memory"] = node.has_only_memory
    for disk, described in zip(machine.disks, found["disks"], strict=True):
        described["path"] = disk.path
    for gpu, described in zip(machine.gpus, found["gpus"], strict=True):
        described["nearest_nodes"] = [node.index for node in machine.nearest_nodes(gpu)]
    return {
        "machine": found,
        "measured": measured,
        "proposal": {
            "options": [asdict(option) for option in proposal.options],
            "notes": list(proposal.notes),
            "toml": proposal.toml(),
        },
    }
