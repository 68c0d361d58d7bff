"""Which memory is near which GPU, as far as the machine says; every answer may be None.

A copy across sockets runs at a third of the speed of a local one, so a worker says which arena it
would rather have. Where nothing is known, every arena is as good as another.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path

from kvtier.cuda.runtime import DeviceAttributes

SYSFS = Path("/sys")

_SYS_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}


def device_node(attributes: DeviceAttributes, sysfs: Path = SYSFS) -> int | None:
    """The node of the host that is nearest to the device."""
    if attributes.numa_node is not None:
        return attributes.numa_node
    path = sysfs / "bus" / "pci" / "devices" / attributes.pci_bus.lower() / "numa_node"
    try:
        node = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: a machine of one node, or a firmware that is silent.


def memory_node(address: int) -> int | None:
    """The node that holds the page at the address; None before its first touch."""
    number = _SYS_MOVE_PAGES.get(_machine())
    if number is None:
        return None
    page = ctypes.c_void_p(address // mmap.PAGESIZE * mmap.PAGESIZE)
    status = ctypes.c_int(-1)
    moved = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_int(0),
        ctypes.c_ulong(1),
        ctypes.byref(page),
        None,  # No node to move to: only ask.
        ctypes.byref(status),
        ctypes.c_int(0),
    )
    return status.value if moved == 0 and status.value >= 0 else None


def nearest(nodes: Sequence[int | None], near: int | None, sysfs: Path = SYSFS) -> int:
    """Index of the arena to use: on the node `near`, else unknown, else the least distant one.

    The first of several equals, so that the caller's order of preference decides.
    """
    assert nodes, "no arena to choose from"
    distances = _distances(near, sysfs) if near is not None else {}

    def cost(index: int) -> tuple[int, int]:
        node = nodes[index]
        if near is None or node == near:
            return 0, 0
        if node is None:
            return 1, 0
        return 2, distances.get(node, 255)

    return min(range(len(nodes)), key=cost)


def _distances(near: int, sysfs: Path) -> dict[int, int]:
    folder = sysfs / "devices" / "system" / "node"
    try:
        values = (folder / f"node{near}" / "distance").read_text(encoding="ascii").split()
        # One value for each node that is online; numbers may have gaps.
        nodes = sorted(int(name[4:]) for name in _names(folder) if re.fullmatch(r"node\d+", name))
    except OSError:
        return {}
    return {node: int(value) for node, value in zip(nodes, values, strict=False)}


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _machine() -> str:
    return os.uname().machine


_libc = ctypes.CDLL(None, use_errno=True)
