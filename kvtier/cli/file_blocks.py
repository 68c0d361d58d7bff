"""A file as a chain of blocks, and the receipt that brings it back.

Form: the file is cut into blocks of `block_bytes`, the last one padded with zeros. The hash of a
block is SHA-256 over the hash before it (32 zero bytes before the first) and the block's bytes, so
a hash proves the content of the whole file up to there. The receipt is a JSON object that `put`
prints and `get` and `match` read; it holds the hashes and the file's length, because padding is
not told from content otherwise.

Blocks travel in groups of about 64 MiB, and each group begins a chain of its own in the daemon: a
call names blocks from a chain's first one on, and a whole file need not fit into our memory.

The namespace is derived from its name and `block_bytes` alone: equal files put under one name share
their blocks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from kvtier.errors import BadRequest, CorruptReplica
from kvtier.namespace import SHARD_BYTES_MAX, NamespaceSpec

HASH_BYTES = 32
FORM = "kvtier-file-1"
GROUP_BYTES = 64 << 20
_HEAD_BYTES = 64
_FIRST_PARENT = bytes(HASH_BYTES)


@dataclass(frozen=True, slots=True)
class Receipt:
    """What `get` needs to write the file again."""

    name: str
    namespace: str
    block_bytes: int
    file_bytes: int
    hashes: tuple[bytes, ...]

    def to_json(self) -> dict[str, object]:
        facts: dict[str, object] = asdict(self)
        return {"form": FORM, **facts, "hashes": [one.hex() for one in self.hashes]}


def spec_of(namespace: str, block_bytes: int) -> NamespaceSpec:
    return NamespaceSpec(
        model=f"file/{namespace}",
        weights="-",
        kv_dtype="bytes",
        layout="file",
        block_tokens=1,
        shard_bytes=block_bytes,
        hash_bytes=HASH_BYTES,
        hash_algorithm="sha256_chain",
    )


def group_count(block_bytes: int) -> int:
    """Blocks in a group."""
    return max(1, GROUP_BYTES // block_bytes)


def block_hash(parent: bytes | None, block: bytes) -> bytes:
    return hashlib.sha256((parent or _FIRST_PARENT) + block).digest()


def blocks_of(file: IO[bytes], block_bytes: int) -> Iterator[tuple[bytes, bytes, int]]:
    """(hash, padded block, bytes before padding) of each block, in order."""
    parent: bytes | None = None
    while piece := _read_full(file, block_bytes):
        block = piece.ljust(block_bytes, b"\0")
        parent = block_hash(parent, block)
        yield parent, block, len(piece)


def check_blocks(parent: bytes | None, hashes: Sequence[bytes], blocks: Sequence[bytes]) -> None:
    """Raises CorruptReplica unless these bytes are what the hashes stand for."""
    for wanted, block in zip(hashes, blocks, strict=True):
        if block_hash(parent, block) != wanted:
            raise CorruptReplica("the daemon returned bytes that do not belong to their hash")
        parent = wanted


def read_receipt(path: Path) -> Receipt:
    """Raises BadRequest that says what is wrong with it."""
    wrong = f"{path} is no receipt of `kvtier put`: give the JSON that it printed"
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            if not head.lstrip().startswith(b"{"):  # Perhaps the file itself, however large.
                raise BadRequest(wrong)
            text = (head + file.read()).decode()
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadRequest(wrong) from None
    try:
        return parse_receipt(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise BadRequest(f"{wrong} ({error})") from None


def parse_receipt(facts: object) -> Receipt:
    """Raises ValueError, KeyError or TypeError."""
    if not isinstance(facts, dict) or facts.get("form") != FORM:
        raise ValueError(f'"form" is not {FORM!r}')
    receipt = Receipt(
        name=str(facts["name"]),
        namespace=str(facts["namespace"]),
        block_bytes=int(facts["block_bytes"]),
        file_bytes=int(facts["file_bytes"]),
        hashes=tuple(bytes.fromhex(one) for one in facts["hashes"]),
    )
    if not 0 < receipt.block_bytes <= SHARD_BYTES_MAX:
        raise ValueError(f"block_bytes is {receipt.block_bytes}")
    if any(len(one) != HASH_BYTES for one in receipt.hashes):
        raise ValueError(f"a hash is not {HASH_BYTES} bytes long")
    if -(-receipt.file_bytes // receipt.block_bytes) != len(receipt.hashes):
        raise ValueError(f"{len(receipt.hashes)} hashes for {receipt.file_bytes} bytes")
    return receipt


class FileWriter:
    """Writes a file beside its place and moves it there when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unfinished = path.with_name(f".{path.name}.{os.getpid()}.kvtier")

    def __enter__(self) -> IO[bytes]:
        self._file = self._unfinished.open("wb")
        return self._file

    def __exit__(self, failure: type[BaseException] | None, *_rest: object) -> None:
        self._file.close()
        if failure is None:
            self._unfinished.replace(self._path)
        else:
            self._unfinished.unlink(missing_ok=True)


def _read_full(file: IO[bytes], count: int) -> bytes:
    """`count` bytes, fewer only at the end; a pipe gives what it has each time."""
    pieces = []
    while count and (piece := file.read(count)):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)
