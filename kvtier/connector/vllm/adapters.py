"""LoRA adapters in block hashes: vLLM hashes an adapter's name and path, not what is in it.

Within one start of an engine that is enough. kvtier outlives engines, and an adapter may be trained
anew under its old name; so the identity of its files goes into the hashes as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_config.json")


class AdapterHashes(Sequence[bytes]):
    """A request's block hashes as kvtier knows them; grows with vLLM's."""

    def __init__(self, hashes: Sequence[bytes], mark: bytes) -> None:
        self._hashes = hashes
        self._mark = mark
        self._marked: list[bytes] = []

    def __len__(self) -> int:
        self._catch_up()
        return len(self._marked)

    def __getitem__(self, index: Any) -> Any:
        self._catch_up()
        return self._marked[index]

    def _catch_up(self) -> None:
        new = self._hashes[len(self._marked) :]
        if not new:
            return
        width = len(new[0])
        packed = np.frombuffer(b"".join(new), dtype=np.uint8).reshape(len(new), width)
        mark = np.frombuffer(self._mark[:width], dtype=np.uint8)
        marked = (packed ^ mark).tobytes()
        self._marked += [marked[first : first + width] for first in range(0, len(marked), width)]


def adapter_mark(lora_request: Any) -> bytes | None:
    """32 bytes that change with the adapter's files; None when they are not to be found."""
    folder = Path(getattr(lora_request, "lora_path", "") or "")
    facts = []
    for name in _FILES:
        try:
            stat = (folder / name).stat()
        except OSError:
            continue
        facts.append((name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(repr(facts).encode()).digest() if facts else None
