"""Clears that the remote engine has not been told yet, kept durably: one empty file a namespace.

The file is there before the namespace is cleared on this node, and goes when no other node uses the
former epoch any more. So a daemon that ends in between, however it ends, finds it when it is
started again. What the file holds does not matter: whatever has its name says that a clear is owed,
which costs misses at worst.

All methods block; the daemon calls them in a thread.
"""

from __future__ import annotations

from pathlib import Path

from kvtier.errors import KVTierError
from kvtier.io.file import sync_directory


class OwedClears:
    """Invariant: what `note` has returned from is owed, for ever, until `forget`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def is_owed(self, fingerprint: bytes) -> bool:
        """Raises OSError where that cannot be told."""
        try:
            self._path_of(fingerprint).lstat()
        except FileNotFoundError:
            return False
        return True

    def note(self, fingerprint: bytes) -> None:
        """Durable when this returns. Raises KVTierError."""
        try:
            self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._path_of(fingerprint).touch(mode=0o640)
            # Of the parent too: the folder itself may be new.
            for one in (self._directory, self._directory.parent):
                sync_directory(one)
        except OSError as error:
            raise KVTierError(
                f"the clear cannot be recorded in {self._directory} ({error.strerror}): "
                "nothing was changed"
            ) from None

    def forget(self, fingerprint: bytes) -> None:
        """Not durable at once: one that comes back after a crash is paid once more."""
        self._path_of(fingerprint).unlink(missing_ok=True)

    def _path_of(self, fingerprint: bytes) -> Path:
        return self._directory / f"{fingerprint.hex()}.owed"
