"""Whose each namespace is, for a later life: one small file a namespace, with its tenant's name.

A fingerprint does not tell, and segments on NVMe count for their tenant before it comes back. A
file that is lost costs that, and nothing else: so nothing is synced.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)

NAME_BYTES_MAX = 1024
_SUFFIX = ".tenant"


class Owners:
    """Of all namespaces that ever were; `note` blocks, and is called in a thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
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


def _read(directory: Path) -> dict[bytes, str]:
    found: dict[bytes, str] = {}
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        try:
            name = path.read_bytes()[:NAME_BYTES_MAX].decode("utf-8")
            found[bytes.fromhex(path.stem)] = name
        except (OSError, ValueError):
            continue  # Not one of ours, or damaged.
    return found
