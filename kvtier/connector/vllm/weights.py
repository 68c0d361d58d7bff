"""A digest of the weights an engine was started with: of its checkpoint's files.

Not of the tensors in memory: what a worker holds may be packed for its hardware, split, or gone
(some CPU kernels keep weights where Python cannot see them). The files say all, and they have just
been read, so that reading them again costs seconds at most.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# What a range is read by, and how many at once: a few threads come near a disk's rate.
RANGE_BYTES = 64 << 20
READ_THREADS = 4
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def files_digest(files: Sequence[Path]) -> str:
    """Of names and contents. Against mix-ups, not against forgery."""
    lines = []
    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="kvtier-weights") as pool:
        for path in sorted(files):
            blob = _blob_name(path)
            if blob is None:
                size = path.stat().st_size
                starts = range(0, size, RANGE_BYTES)
                parts = pool.map(_range_digest, [path] * len(starts), starts)
                blob = f"{size} {'-'.join(parts)}"
            lines.append(f"{path.name} {blob}\n")
    return "files:" + hashlib.sha256("".join(lines).encode()).hexdigest()


def weight_files(path: Path) -> list[Path]:
    """The files that make up the weights at `path`, a folder or one file; empty if none are."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    found = [p for p in path.iterdir() if p.suffix in WEIGHT_SUFFIXES and p.is_file()]
    if not found:
        return []
    # How they are to be read: RoPE, quantization.
    return found + [p for p in (path / "config.json", path / "params.json") if p.is_file()]


def _blob_name(path: Path) -> str | None:
    """Hugging Face's cache keeps every file under its content's hash already."""
    target = path.resolve()
    is_blob = target.parent.name == "blobs" and _BLOB.fullmatch(target.name) is not None
    return f"blob {target.name}" if is_blob and path.is_symlink() else None


def _range_digest(path: Path, start: int) -> str:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), start, RANGE_BYTES, os.POSIX_FADV_SEQUENTIAL)
        file.seek(start)
        digest, left = xxhash.xxh3_128(), RANGE_BYTES
        buffer = bytearray(4 << 20)
        while left > 0:
            count = file.readinto(memoryview(buffer)[: min(left, len(buffer))])
            if not count:
                break
            digest.update(memoryview(buffer)[:count])
            left -= count
    return digest.hexdigest()
