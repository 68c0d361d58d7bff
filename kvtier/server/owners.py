"""Whose each namespace is, for a later life: one small file a namespace, with its tenant's name.

A fingerprint does not tell, and segments on NVMe count for their tenant before it comes back; a
purge of a tenant looks here as well. A file that is lost costs that, and nothing else: so nothing
is synced. Where nothing but NVMe outlives the daemon, files of namespaces of which nothing is found
there go when it starts; else there are so many at most, the newest.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

NAME_BYTES_MAX = 1024
OWNERS_MAX = 16_384  # A file takes a block of the disk: 64 MiB of 4 KiB each.
_SUFFIX = ".tenant"


class Owners:
    """Of all namespaces of which anything may be left; what changes it blocks, and is called in a
    thread."""

    def __init__(self, directory: Path, *, is_nvme_all: bool = True) -> None:
        """`is_nvme_all`: no other tier outlives the daemon."""
        self._directory = directory
        self._is_nvme_all = is_nvme_all
        self._known = _read(directory)

    def known(self) -> dict[bytes, str]:
        """Tenants by fingerprint."""
        return dict(self._known)

    def known_tenant(self, fingerprint: bytes) -> str | None:
        return self._known.get(fingerprint)

    def note(self, fingerprint: bytes, tenant: str) -> None:
        if self._known.get(fingerprint) == tenant:
            return
        self._known[fingerprint] = tenant
        path = self._directory / f"{fingerprint.hex()}{_SUFFIX}"
        try:
            self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            path.write_text(tenant, encoding="utf-8")
        except OSError as error:
            log.warning("tenant not recorded", extra={"path": path, "reason": error.strerror})

    def forget(self, fingerprint: bytes) -> None:
        """Blocks. A file that comes back after a crash says whose nothing is."""
        self._known.pop(fingerprint, None)
        (self._directory / f"{fingerprint.hex()}{_SUFFIX}").unlink(missing_ok=True)

    def keep_only(self, fingerprints: Container[bytes]) -> None:
        """Of other namespaces there is nothing on NVMe."""
        if not self._is_nvme_all:
            return
        for fingerprint in [one for one in self._known if one not in fingerprints]:
            with suppress(OSError):  # The next start tries again.
                self.forget(fingerprint)


def _read(directory: Path) -> dict[bytes, str]:
    found: dict[bytes, str] = {}
    paths = sorted(directory.glob(f"*{_SUFFIX}"), key=_written_at, reverse=True)
    for path in paths[OWNERS_MAX:]:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    for path in paths[:OWNERS_MAX]:
        try:
            name = path.read_bytes()[:NAME_BYTES_MAX].decode("utf-8")
            found[bytes.fromhex(path.stem)] = name
        except (OSError, ValueError):
            continue  # Not one of ours, or damaged.
    return found


def _written_at(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except OSError:
        return 0.0, path.name
