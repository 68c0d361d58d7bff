"""`kvtier put FILE`: a file into the daemon, block by block; prints the receipt for `get`.

The receipt is the JSON on standard output, with --json or without; --json adds the counts to it.
When the whole file was put, it is asked how much of it is resident: of one larger than the pool,
the last blocks have driven out earlier ones. Exit codes: 0; 1 when not all of it is resident; 2 for
a mistake in the arguments; 3 when no daemon answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import IO

from kvtier.cli import file_blocks
from kvtier.cli.connect import add_socket_argument, connected, open_namespace, tool_settings
from kvtier.cli.match import match_file
from kvtier.cli.output import add_json_argument, bytes_text, print_json, say
from kvtier.cli.sizes import size
from kvtier.client.client import Client
from kvtier.client.values import Namespace, PutResult
from kvtier.errors import BadRequest

BLOCK_BYTES = 2 << 20
EXIT_NOT_RESIDENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--namespace", default="files", metavar="NAME", help="namespace of files (files)"
    )
    parser.add_argument(
        "--block-bytes", type=size, default=BLOCK_BYTES, metavar="SIZE", help="of a block (2MiB)"
    )
    add_socket_argument(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        file = arguments.file.open("rb")
    except OSError as error:
        raise BadRequest(f"cannot read {arguments.file}: {error.strerror}") from None
    spec = file_blocks.spec_of(arguments.namespace, arguments.block_bytes)
    spec.validate()
    with (
        file,
        connected(arguments.socket, name="kvtier put", settings=tool_settings(arguments)) as client,
    ):
        namespace = open_namespace(client, spec)
        putting = _Putting(client, namespace)
        putting.put_all(file, arguments.block_bytes)
        receipt = file_blocks.Receipt(
            name=arguments.file.name,
            namespace=arguments.namespace,
            block_bytes=arguments.block_bytes,
            file_bytes=putting.file_bytes,
            hashes=tuple(putting.hashes),
        )
        resident_count = match_file(client, namespace, receipt).matched_count
    return _tell(arguments, receipt, putting, resident_count)


def _tell(
    arguments: argparse.Namespace,
    receipt: file_blocks.Receipt,
    putting: _Putting,
    resident_count: int,
) -> int:
    counts = {
        "ready_count": putting.ready_count,
        "present_count": putting.present_count,
        "refused_count": putting.refused_count,
        "resident_count": resident_count,
    }
    print_json({**receipt.to_json(), **(counts if arguments.json else {})})
    say(
        f"{arguments.file}: {bytes_text(receipt.file_bytes)} in {len(receipt.hashes)} blocks, "
        f"{putting.ready_count} new, {putting.present_count} resident before"
    )
    if putting.refused_count:
        say(f"{putting.refused_count} blocks were refused: the pool has no room for them")
    if resident_count < len(receipt.hashes):
        say(
            f"only {resident_count} of {len(receipt.hashes)} blocks are resident: `kvtier get` "
            "cannot write the file; give the daemon more memory (dram.bytes)"
        )
        return EXIT_NOT_RESIDENT
    return 0


class _Putting:
    """A file on its way, a group of blocks a call."""

    def __init__(self, client: Client, namespace: Namespace) -> None:
        self._client = client
        self._namespace = namespace
        self.hashes: list[bytes] = []
        self.file_bytes = 0
        self.ready_count = 0
        self.present_count = 0
        self.refused_count = 0

    def put_all(self, file: IO[bytes], block_bytes: int) -> None:
        group_count = file_blocks.group_count(block_bytes)
        group: list[tuple[bytes, bytes]] = []
        for block_hash, block, used_bytes in file_blocks.blocks_of(file, block_bytes):
            self.file_bytes += used_bytes
            group.append((block_hash, block))
            if len(group) == group_count:
                self._put(group)
                group = []
        if group:
            self._put(group)

    def _put(self, group: list[tuple[bytes, bytes]]) -> None:
        self.hashes += [block_hash for block_hash, _ in group]
        result: PutResult = self._client.put(self._namespace, group)
        self.ready_count += result.ready_count
        self.present_count += result.present_count
        self.refused_count += result.refused_count
