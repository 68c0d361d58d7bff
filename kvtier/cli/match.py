"""`kvtier match RECEIPT`: how much of a file is resident, and where; changes nothing.

Exit codes: 0, however much it is; 2 for a mistake in the arguments; 3 when no daemon answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvtier.cli import file_blocks
from kvtier.cli.connect import add_socket_argument, connected, open_namespace, tool_settings
from kvtier.cli.output import add_json_argument, print_json
from kvtier.client.client import Client
from kvtier.client.values import Namespace
from kvtier.types import PrefixMatch, TierName


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("receipt", type=Path, metavar="RECEIPT", help="JSON that `put` printed")
    add_socket_argument(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    receipt = file_blocks.read_receipt(arguments.receipt)
    spec = file_blocks.spec_of(receipt.namespace, receipt.block_bytes)
    with connected(
        arguments.socket, name="kvtier match", settings=tool_settings(arguments)
    ) as client:
        found = match_file(client, open_namespace(client, spec), receipt)
    if arguments.json:
        print_json(
            {
                "block_count": len(receipt.hashes),
                "matched_count": found.matched_count,
                "memory_count": found.memory_count,
                "tiers": dict(found.tiers),
                "matched_bytes": min(found.matched_count * receipt.block_bytes, receipt.file_bytes),
            }
        )
    else:
        print(text_of(found, len(receipt.hashes)))
    return 0


def text_of(found: PrefixMatch, block_count: int) -> str:
    """For people."""
    where = ", ".join(f"{count} in {tier}" for tier, count in found.tiers if count)
    told = f"{found.matched_count} of {block_count} blocks are resident"
    return f"{told}: {where}" if where else told


def match_file(client: Client, namespace: Namespace, receipt: file_blocks.Receipt) -> PrefixMatch:
    """Blocks of the file that are resident, those of them that are in memory, and all by tier."""
    matched_count = memory_count = 0
    tiers = dict.fromkeys(TierName, 0)
    group = file_blocks.group_count(receipt.block_bytes)
    for first in range(0, len(receipt.hashes), group):
        match = client.match(namespace, receipt.hashes[first : first + group])
        matched_count += match.matched_count
        memory_count += match.memory_count
        for tier, count in match.tiers:
            tiers[tier] += count
    found = tuple((tier, count) for tier, count in tiers.items() if count)
    return PrefixMatch(matched_count, memory_count, found)
