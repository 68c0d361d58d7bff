"""Blocks that say whose they are in every 64 bytes, and where such bytes are found."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvtier.client import Client, Namespace
from kvtier.memory import Bytes
from kvtier.namespace import NamespaceSpec
from tests.support.known_blocks import chain_hashes

SHARD_BYTES = 64 << 10
LINE_BYTES = 64


def mark_of(owner: str) -> bytes:
    return f"these bytes are of {owner}".encode().ljust(32, b".")


def payload_of(owner: str, block: bytes) -> Bytes:
    line = mark_of(owner) + block.ljust(32, b"\0")[:32]
    return np.frombuffer(line * (SHARD_BYTES // LINE_BYTES), np.uint8)


def spec_of(owner: str) -> NamespaceSpec:
    return NamespaceSpec(f"model of {owner}", "v1", "bfloat16", "nhd", 16, SHARD_BYTES)


def opened(client: Client, owner: str, seconds: float = 20.0) -> Namespace:
    namespace = client.open_namespace(spec_of(owner))
    assert client.wait_namespace(namespace, seconds), namespace.error
    return namespace


def put(client: Client, owner: str, count: int, label: str = "") -> list[bytes]:
    """A chain of so many blocks; its hashes, once the daemon has acknowledged them."""
    hashes = chain_hashes(owner + label, count)
    blocks = [(one, payload_of(owner, one)) for one in hashes]
    done = client.put(opened(client, owner), blocks)
    assert done.ready_count == count, done
    return hashes


def hit_count(client: Client, owner: str, hashes: Sequence[bytes]) -> int:
    """Leading blocks that come back; each must be right."""
    found = client.get(opened(client, owner), hashes)
    for one, data in zip(hashes, found, strict=False):
        assert bytes(data) == payload_of(owner, one).tobytes(), "wrong bytes"
    return len(found)


def places_with(mark: bytes, pid: int, paths: Sequence[Path]) -> list[str]:
    """Files, those in folders too, and memfds of the process in which the mark stands."""
    found = [str(path) for path in _files(paths) if _has(path, mark)]
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # Closed meanwhile.
            name = os.readlink(entry)
            if "memfd:" in name and _has(entry, mark):
                found.append(name)
    return found


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from (one for one in sorted(path.rglob("*")) if one.is_file())
        else:
            yield path


def _has(path: Path, mark: bytes) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)  # A device's too.
        if not size:
            return False
        with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as whole:
            return whole.find(mark) >= 0
