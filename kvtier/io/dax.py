"""Device memory as files: `/dev/daxX.Y`, and what sysfs tells of it.

Such a device can be mapped and nothing else: reads and writes by system call are refused, its
length as a file is 0, and every mapping must be a multiple of its alignment.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.io.sysfs import SYSFS, names, read_number, read_text

# The driver that gives the device to user space. With `kmem` its memory is a NUMA node's.
DEVDAX_DRIVER = "device_dax"
SYSTEM_MEMORY_DRIVER = "kmem"


@dataclass(frozen=True, slots=True)
class DaxDevice:
    """One device."""

    path: Path
    size_bytes: int
    align_bytes: int
    target_node: int | None  # The node that its memory would be, as system memory.
    near_node: int | None  # The node that its bus hangs on.
    driver: str  # Empty: none.

    @property
    def is_mappable(self) -> bool:
        return self.driver == DEVDAX_DRIVER


def read_dax_devices(sysfs: Path = SYSFS, dev: Path = Path("/dev")) -> list[DaxDevice]:
    """Every device that the kernel has, by name."""
    folder = sysfs / "bus/dax/devices"
    return [_read_device(folder / name, dev / name) for name in names(folder)]


def find_dax_device(path: Path, sysfs: Path = SYSFS) -> DaxDevice:
    """The device behind a path; ConfigError when it is none, or none that can be mapped."""
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if not stat.S_ISCHR(status.st_mode):
        raise ConfigError(f"{path} is no device such as /dev/dax0.0")
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return device_numbered(number, path, sysfs)


def device_numbered(number: str, path: Path, sysfs: Path = SYSFS) -> DaxDevice:
    """The device with this "major:minor"; ConfigError as in `find_dax_device`."""
    folder = sysfs / "bus/dax/devices"
    name = next((one for one in names(folder) if read_text(folder / one / "dev") == number), None)
    if name is None:
        raise ConfigError(f"{path} is no dax device: none of {folder} has the number {number}")
    found = _read_device(folder / name, path)
    if found.driver == SYSTEM_MEMORY_DRIVER:
        raise ConfigError(
            f"{path} is system memory (driver kmem): use NUMA node {found.target_node}, or take "
            f"it back with `daxctl reconfigure-device --mode=devdax {name}`"
        )
    if not found.is_mappable or found.size_bytes <= 0 or found.align_bytes <= 0:
        raise ConfigError(
            f"{path} cannot be mapped: driver {found.driver or 'none'}, {found.size_bytes} bytes, "
            f"alignment {found.align_bytes}"
        )
    return found


def _read_device(folder: Path, path: Path) -> DaxDevice:
    driver = folder / "driver"
    return DaxDevice(
        path=path,
        size_bytes=read_number(folder / "size") or 0,
        align_bytes=read_number(folder / "align") or 0,
        target_node=_node(read_number(folder / "target_node")),
        near_node=_node(read_number(folder / "numa_node")),
        driver=os.path.basename(os.readlink(driver)) if driver.is_symlink() else "",
    )


def _node(number: int | None) -> int | None:
    return None if number is None or number < 0 else number  # -1: not told.
