"""`kvtier match RECEIPT`: how much of a file is resident; changes nothing.

Exit codes: 0, however much it is; 2 for a mistake in the arguments; 3 when no daemon answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvtier.cli import file_blocks
from kvtier.cli.connect import add_socket_argument, connected, open_namespace
from kvtier.cli.output import add_json_argument, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("receipt", type=Path, metavar="RECEIPT", help="JSON that `put` printed")
    add_socket_argument(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    receipt = file_blocks.read_receipt(arguments.receipt)
    spec = file_blocks.spec_of(receipt.namespace, receipt.block_bytes)
    matched_count = memory_count = 0
    with connected(arguments.socket, name="kvtier match") as client:
        namespace = open_namespace(client, spec)
        group = file_blocks.group_count(receipt.block_bytes)
        for first in range(0, len(receipt.hashes), group):
            part = receipt.hashes[first : first + group]
            match = client.match(namespace, part)
            matched_count += match.matched_count
            memory_count += match.memory_count
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
