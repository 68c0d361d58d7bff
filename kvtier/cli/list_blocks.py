"""`kvtier list`: the resident blocks of a running daemon, each with the tiers it is in.

Exit codes: 0; 2 when there is no such namespace; 3 when no daemon answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from kvtier.cli.connect import add_socket_argument, connected, tool_settings
from kvtier.cli.output import add_json_argument, print_json
from kvtier.client.client import Client
from kvtier.errors import BadRequest
from kvtier.types import TierName
from kvtier.v1 import kvtier_pb2 as pb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--namespace",
        metavar="FINGERPRINT",
        help="of this namespace alone; its fingerprint, or how that begins (see `kvtier stats`)",
    )
    add_socket_argument(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    with connected(
        arguments.socket, name="kvtier list", settings=tool_settings(arguments)
    ) as client:
        for namespace in chosen(client.stats(), arguments.namespace):
            fingerprint = namespace.fingerprint.hex()
            for block, tiers in resident_blocks(client, namespace.namespace_id):
                if arguments.json:
                    line = {"namespace": fingerprint, "hash": block.hex(), "tiers": tiers}
                    print_json(line, compact=True)
                else:
                    print(fingerprint, block.hex(), ",".join(tiers))
    return 0


def chosen(stats: pb.StatsResponse, begins: str | None) -> list[pb.NamespaceStats]:
    """Raises BadRequest when none is meant, or more than one."""
    if begins is None:
        return list(stats.namespaces)
    found = [one for one in stats.namespaces if one.fingerprint.hex().startswith(begins)]
    if len(found) != 1:
        known = ", ".join(one.fingerprint.hex() for one in found or stats.namespaces) or "none"
        raise BadRequest(f"{len(found)} namespaces begin with {begins!r}: there are {known}")
    return found


def resident_blocks(client: Client, namespace_id: int) -> Iterator[tuple[bytes, list[str]]]:
    """Each with its tiers. What moves meanwhile may be told twice, or not."""
    row = 0
    while True:  # Ends: the daemon says which page is the last one.
        page = client.list_page(namespace_id, row)
        size = len(page.hashes) // max(1, len(page.tiers))
        for number, bits in enumerate(page.tiers):
            tiers = [str(tier) for place, tier in enumerate(TierName) if bits >> place & 1]
            yield page.hashes[number * size : (number + 1) * size], tiers
        row = page.row_next
        if not row:
            return
