"""The disks of a machine, and which of them nobody uses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvtier.io.sysfs import names, read_number, read_text

_SECTOR_BYTES = 512  # The unit of sysfs, whatever the disk's own is.
# Not disks: loops, memory, optical drives, floppies; and what is made of other disks.
_OTHERS = re.compile(r"(loop|ram|zram|sr|fd|dm-|nbd|mtdblock)\d+.*")
# GT/s a lane -> bytes a second a lane, encoding taken off.
_LANE_BYTES = {2.5: 250e6, 5.0: 500e6, 8.0: 985e6, 16.0: 1_969e6, 32.0: 3_938e6, 64.0: 7_563e6}


class DiskKind(StrEnum):
    NVME = "nvme"
    SSD = "ssd"
    VIRTUAL = "virtual"
    ROTATING = "rotating"


@dataclass(frozen=True, slots=True)
class Disk:
    """A whole disk."""

    name: str
    kind: DiskKind
    size_bytes: int
    model: str
    node: int | None
    link_bytes_per_second: int | None  # What its PCIe link carries at most.
    used_by: str  # Empty: nobody that the kernel knows of. It may hold something all the same.

    @property
    def path(self) -> str:
        return f"/dev/{self.name}"


def read_disks(sysfs: Path, proc: Path) -> list[Disk]:
    """Every disk with a size, by name."""
    found = []
    for name in names(sysfs / "block"):
        folder = sysfs / "block" / name
        sectors = read_number(folder / "size") or 0
        if _OTHERS.fullmatch(name) or not sectors or read_number(folder / "hidden") == 1:
            continue
        node = read_number(folder / "device/numa_node")
        if node is None:
            node = read_number(folder / "device/device/numa_node")  # NVMe: of its controller.
        found.append(
            Disk(
                name=name,
                kind=_kind(name, folder),
                size_bytes=sectors * _SECTOR_BYTES,
                model=read_text(folder / "device/model") or "",
                node=None if node is None or node < 0 else node,
                link_bytes_per_second=_link(folder / "device/device"),
                used_by=_used_by(name, folder, proc),
            )
        )
    return found


def _kind(name: str, folder: Path) -> DiskKind:
    if name.startswith("nvme"):
        return DiskKind.NVME
    # What a virtual disk says of rotation is its maker's whim.
    if name.startswith(("vd", "xvd")):
        return DiskKind.VIRTUAL
    return DiskKind.ROTATING if read_number(folder / "queue/rotational") == 1 else DiskKind.SSD


def _link(device: Path) -> int | None:
    """ "16.0 GT/s PCIe" and 4 lanes."""
    speed = re.match(r"[\d.]+", read_text(device / "current_link_speed") or "")
    width = read_number(device / "current_link_width")
    if speed is None or not width:
        return None
    lane = _LANE_BYTES.get(float(speed[0]))
    return None if lane is None else int(lane * width)


def _used_by(name: str, folder: Path, proc: Path) -> str:
    parts = [part for part in names(folder) if (folder / part / "partition").exists()]
    if parts:
        return "partitions"
    if holders := names(folder / "holders"):
        return ", ".join(holders)
    number = read_text(folder / "dev")
    for line in (read_text(proc / "self/mountinfo") or "").splitlines():
        fields = line.split()
        if len(fields) > 4 and fields[2] == number:
            return f"mounted at {fields[4]}"
    rows = (read_text(proc / "swaps") or "").splitlines()[1:]
    if any(line.split()[:1] == [f"/dev/{name}"] for line in rows):
        return "swap"
    return ""
