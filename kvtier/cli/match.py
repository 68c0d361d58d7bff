"""`kvtier match RECEIPT`: how much of a file is resident; changes nothing.

Exit codes: 0, however much it is; 2 for a mistake in the arguments; 3 when no daemon answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvtier.cli import file_blocks
from kvtier.cli.connect import add_socket_argument, connected, open_namespace
from kvtier.cli.output import add_json_argument, print_json
from kvtier.client.client import Client
from kvtier.client.values import Namespace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("receipt", type=Path, metavar="RECEIPT", help="JSON that `put` printed")
    add_socket_argument(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    receipt = file_blocks.read_receipt(arguments.receipt)
    spec = file_blocks.spec_of(receipt.namespace, receipt.block_bytes)
    with connected(arguments.socket, name="kvtier match") as client:
        matched_count, memory_count = resident_counts(client, open_namespace(client, spec), receipt)
    if arguments.json:
        print_json(
            {
                "block_count": len(receipt.hashes),
                "matched_count": matched_count,
                "memory_count": memory_count,
                "matched_bytes": min(matched_count * receipt.block_bytes, receipt.file_bytes),
            }
        )
    else:
        print(f"{matched_count} of {len(receipt.hashes)} blocks are resident")
    return 0


def resident_counts(
    client: Client, namespace: Namespace, receipt: file_blocks.Receipt
) -> tuple[int, int]:
    """Blocks of the file that are resident, and those of them in memory."""
    matched_count = memory_count = 0
    group = file_blocks.group_count(receipt.block_bytes)
    for first in range(0, len(receipt.hashes), group):
        match = client.match(namespace, receipt.hashes[first : first + group])
        matched_count += match.matched_count
        memory_count += match.memory_count
    return matched_count, memory_count
