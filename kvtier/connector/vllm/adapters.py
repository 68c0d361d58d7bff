"""LoRA adapters in block hashes: vLLM hashes an adapter's name and path, not what is in it.

Within one start of an engine that is enough. kvtier outlives engines, and an adapter may be trained
anew under its old name; so the identity of its files goes into the hashes as well.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

# Adapters remembered; more go without kvtier.
ADAPTERS_MAX = 65_536
_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_config.json")


class AdapterHashes(Sequence[bytes]):
    """A request's block hashes as kvtier knows them; grows with vLLM's.

    It grows in the scheduler's thread alone, which asks for its length. Other threads read no
    further than the length was that they were told: were they to extend it at the same moment,
    every later hash would stand for another block.
    """

    def __init__(self, hashes: Sequence[bytes], mark: bytes) -> None:
        self._hashes = hashes
        self._mark = mark
        self._marked: list[bytes] = []

    def __len__(self) -> int:
        self._catch_up()
        return len(self._marked)

    def __getitem__(self, index: Any) -> Any:
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


class AdapterMarks:
    """Marks of the adapters seen since the engine's KV was last empty; of the scheduler's thread.

    An engine loads an adapter once and keeps it, whatever becomes of its files; and what it has
    cached itself it finds by name and path. When the files change, nobody here can tell which ones
    some KV was computed with.
    """

    def __init__(self) -> None:
        self._marks: dict[tuple[str, str], bytes | None] = {}

    def mark_of(self, lora_request: Any) -> bytes | None:
        """32 bytes that change with the adapter's files; None when that is in doubt."""
        adapter = lora_request.lora_name, lora_request.lora_path
        mark = _files_mark(Path(lora_request.lora_path))
        if adapter not in self._marks:
            if mark is not None and len(self._marks) < ADAPTERS_MAX:
                self._marks[adapter] = mark
                return mark
            return None
        known = self._marks[adapter]
        if known is not None and mark != known:
            self._marks[adapter] = known = None
            log.warning(
                "kvtier: the files of LoRA adapter %s changed while the engine knows it; its"
                " requests go without kvtier until the engine starts again; give what is trained"
                " anew another name or path",
                lora_request.lora_name,
            )
        return known

    def clear(self) -> None:
        """The engine has dropped all its KV."""
        self._marks.clear()


def _files_mark(folder: Path) -> bytes | None:
    facts = []
    for name in _FILES:
        try:
            stat = (folder / name).stat()
        except OSError:
            continue
        # Archives and images may give every file the same time of change; the inode's own time is
        # the file system's.
        facts.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return hashlib.sha256(repr(facts).encode()).digest() if facts else None
