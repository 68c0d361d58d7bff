"""`kvtier get RECEIPT`: write a file that was put, from its receipt.

Every block is compared with its hash. The file appears when it is whole, or not at all.
Exit codes: 0; 1 when blocks are missing or wrong; 2 for a mistake in the arguments; 3 when no
daemon answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvtier.cli import file_blocks
from kvtier.cli.connect import add_socket_argument, connected, open_namespace, tool_settings
from kvtier.cli.output import add_json_argument, bytes_text, print_json, say
from kvtier.client.client import Client
from kvtier.client.values import Namespace
from kvtier.errors import BadRequest, CorruptReplica, KVTierError

EXIT_MISSING = 1


class BlocksMissing(KVTierError):
    """Some blocks of the file are not resident any more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("receipt", type=Path, metavar="RECEIPT", help="JSON that `put` printed")
    parser.add_argument(
        "--output", "-o", type=Path, metavar="FILE", help="where to (the file's own name, here)"
    )
    add_socket_argument(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    receipt = file_blocks.read_receipt(arguments.receipt)
    output = arguments.output or Path(Path(receipt.name).name or "kvtier-file")
    spec = file_blocks.spec_of(receipt.namespace, receipt.block_bytes)
    with connected(
        arguments.socket, name="kvtier get", settings=tool_settings(arguments)
    ) as client:
        namespace = open_namespace(client, spec)
        try:
            _write(client, namespace, receipt, output)
        except (BlocksMissing, CorruptReplica) as error:
            return _tell_missing(arguments, error)
        except OSError as error:
            raise BadRequest(f"cannot write {output}: {error.strerror}") from None
    if arguments.json:
        print_json(
            {
                "file": str(output),
                "file_bytes": receipt.file_bytes,
                "block_count": len(receipt.hashes),
                "complete": True,
            }
        )
    say(f"{output}: {bytes_text(receipt.file_bytes)} from {len(receipt.hashes)} blocks")
    return 0


def _write(
    client: Client, namespace: Namespace, receipt: file_blocks.Receipt, output: Path
) -> None:
    group = file_blocks.group_count(receipt.block_bytes)
    left_bytes = receipt.file_bytes
    with file_blocks.FileWriter(output) as file:
        for first in range(0, len(receipt.hashes), group):
            hashes = receipt.hashes[first : first + group]
            blocks = client.get(namespace, hashes)
            if len(blocks) < len(hashes):
                raise BlocksMissing(
                    f"block {first + len(blocks)} of {len(receipt.hashes)} is not resident "
                    "(any more): put the file again"
                )
            file_blocks.check_blocks(receipt.hashes[first - 1] if first else None, hashes, blocks)
            for block in blocks:
                file.write(memoryview(block)[:left_bytes])
                left_bytes -= min(left_bytes, len(block))


def _tell_missing(arguments: argparse.Namespace, error: KVTierError) -> int:
    if arguments.json:
        print_json({"complete": False, "error": type(error).__name__, "message": str(error)})
    say(f"kvtier: {type(error).__name__}: {error}")
    return EXIT_MISSING
