"""A file in place of a dax device: it can be mapped all the same."""

from __future__ import annotations

from pathlib import Path

from kvtier.io.dax import DEVDAX_DRIVER, DaxDevice

MIB = 1 << 20


def dax_file(path: Path, size_bytes: int, *, align_bytes: int = 2 * MIB) -> DaxDevice:
    """A new file of this size, all zeros, and what sysfs would tell of the device."""
    with path.open("xb") as file:
        file.truncate(size_bytes)
    return DaxDevice(path, size_bytes, align_bytes, 1, 0, DEVDAX_DRIVER)
