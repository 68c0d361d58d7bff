"""Epochs of namespaces, kept durably: one small file a namespace fingerprint.

    offset  size  field
         0     4  magic, b"KVE1"
         4    16  namespace fingerprint
        20     4  count of epochs, little-endian
        24   4*n  epochs this namespace had, oldest first; the last one is the current
     24+4n     4  CRC-32 of all that precedes

A file is replaced as a whole: temporary file, fdatasync, rename, fsync of the directory. So after a
crash it holds the old epoch or the new one. A file that is lost or damaged means a new random
epoch: everything written under an older one is void, which is a miss and never a wrong block.

All methods block; the daemon calls them in a thread.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

from kvtier.errors import KVTierError
from kvtier.io.file import sync_directory

log = logging.getLogger(__name__)

MAGIC = b"KVE1"
# A namespace cleared once a minute fills it in three days; older epochs then can be drawn again
# with a chance of one in four thousand million.
REMEMBERED_MAX = 4096
FINGERPRINT_BYTES = 16
_HEAD = struct.Struct("<4s16sI")


class EpochStore:
    """Invariant: an epoch that was returned is durable and was not returned before a Clear."""

    def __init__(self, directory: Path, draw: Callable[[], int]) -> None:
        self._directory = directory
        self._draw = draw  # A random 32-bit number.
        self._lock = threading.Lock()

    def ensure(self, fingerprint: bytes) -> int:
        """The namespace's current epoch; a new one when there is no readable record."""
        with self._lock:
            epochs = self._read(fingerprint)
            return epochs[-1] if epochs else self._append(fingerprint, epochs)

    def renew(self, fingerprint: bytes) -> int:
        """A new epoch, durable when this returns."""
        with self._lock:
            return self._append(fingerprint, self._read(fingerprint))

    def current_epochs(self) -> dict[bytes, int]:
        """By fingerprint, of every namespace that has a readable record."""
        found = {}
        with self._lock:
            for path in sorted(self._directory.glob("*.epoch")):
                fingerprint = _fingerprint_of(path)
                if fingerprint is not None and (epochs := self._read(fingerprint)):
                    found[fingerprint] = epochs[-1]
        return found

    def path_of(self, fingerprint: bytes) -> Path:
        return self._directory / f"{fingerprint.hex()}.epoch"

    def _append(self, fingerprint: bytes, epochs: list[int]) -> int:
        epoch = self._draw()
        while epoch == 0 or epoch in epochs:  # Ends: at most 4096 of 2^32 numbers are taken.
            epoch = self._draw()
        try:
            self._write(fingerprint, [*epochs, epoch][-REMEMBERED_MAX:])
        except OSError as error:
            raise KVTierError(
                f"the epoch cannot be recorded in {self._directory} ({error.strerror}): "
                "nothing was changed"
            ) from None
        return epoch

    def _read(self, fingerprint: bytes) -> list[int]:
        path = self.path_of(fingerprint)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning("epoch record unreadable", extra={"path": path, "reason": error.strerror})
            return []
        epochs = _decode(data, fingerprint)
        if not epochs:
            log.warning("epoch record damaged, a new epoch begins", extra={"path": path})
        return epochs

    def _write(self, fingerprint: bytes, epochs: list[int]) -> None:
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        path = self.path_of(fingerprint)
        temporary = path.with_suffix(".new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(_encode(fingerprint, epochs))
                file.flush()
                os.fdatasync(fd)
            temporary.rename(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(self._directory)


def _fingerprint_of(path: Path) -> bytes | None:
    """None for a file that is not one of ours."""
    try:
        fingerprint = bytes.fromhex(path.stem)
    except ValueError:
        return None
    return fingerprint if len(fingerprint) == FINGERPRINT_BYTES else None


def _encode(fingerprint: bytes, epochs: list[int]) -> bytes:
    body = _HEAD.pack(MAGIC, fingerprint, len(epochs)) + struct.pack(f"<{len(epochs)}I", *epochs)
    return body + struct.pack("<I", zlib.crc32(body))


def _decode(data: bytes, fingerprint: bytes) -> list[int]:
    """The epochs, or [] for anything that is not exactly a record of this namespace."""
    if len(data) < _HEAD.size + 8:
        return []
    magic, owner, count = _HEAD.unpack_from(data)
    if magic != MAGIC or owner != fingerprint or len(data) != _HEAD.size + 4 * count + 4:
        return []
    (crc,) = struct.unpack_from("<I", data, len(data) - 4)
    if crc != zlib.crc32(data[:-4]):
        return []
    epochs = list(struct.unpack_from(f"<{count}I", data, _HEAD.size))
    return epochs if epochs[-1] != 0 else []
