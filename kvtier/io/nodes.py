"""NUMA nodes as sysfs describes them: processors, memory, distances and, from ACPI's HMAT, speeds.

A node with memory and without processors is how CXL memory looks once the kernel has it online.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

from kvtier.io.sysfs import SYSFS, numbered, parse_list, read_fields, read_number, read_text

_HUGE_PAGES = "hugepages/hugepages-2048kB"


@dataclass(frozen=True, slots=True)
class AccessClass:
    """A node's memory seen from its nearest initiators, as the firmware tells (HMAT)."""

    number: int  # 0: any initiator, such as a GPU; 1: processors only.
    initiators: tuple[int, ...]  # Nodes.
    read_bytes_per_second: int | None
    write_bytes_per_second: int | None
    read_latency_ns: int | None
    write_latency_ns: int | None


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node that is online."""

    index: int
    cpus: tuple[int, ...]
    memory_bytes: int
    free_bytes: int  # What can be taken without pushing anything out.
    distances: tuple[tuple[int, int], ...]  # (node, distance), itself with 10 among them.
    access: tuple[AccessClass, ...] = ()
    huge_count: int = 0  # Reserved huge pages of 2 MiB.
    huge_free_count: int = 0

    @property
    def has_only_memory(self) -> bool:
        return not self.cpus and self.memory_bytes > 0

    @property
    def from_processors(self) -> AccessClass | None:
        """What a processor's copy may expect; None where the firmware is silent."""
        return max(self.access, key=lambda one: one.number, default=None)

    def distance_to(self, node: int) -> int | None:
        return dict(self.distances).get(node)


def read_nodes(sysfs: Path = SYSFS) -> list[Node]:
    """Every node that is online, by number; empty where the kernel knows nothing of NUMA."""
    folders = list(numbered(sysfs / "devices/system/node", "node"))
    online = [index for index, _ in folders]
    return [_read_node(index, folder, online) for index, folder in folders]


def read_node(index: int, sysfs: Path = SYSFS) -> Node | None:
    return next((node for node in read_nodes(sysfs) if node.index == index), None)


def node_room_bytes(
    index: int, sysfs: Path = SYSFS, zones: Path = Path("/proc/zoneinfo")
) -> int | None:
    """What can be taken of this node before anybody is killed for it; None when it does not say.

    Less than is free: below a zone's watermarks the kernel frees memory by force, and what is bound
    to the node can come from nowhere else.
    """
    free = _room_bytes(read_fields(sysfs / f"devices/system/node/node{index}/meminfo"))
    return None if free is None else max(0, free - _kept_bytes(index, read_text(zones) or ""))


def _read_node(index: int, folder: Path, online: list[int]) -> Node:
    memory = read_fields(folder / "meminfo")
    distances = (read_text(folder / "distance") or "").split()
    return Node(
        index=index,
        cpus=parse_list(read_text(folder / "cpulist") or ""),
        memory_bytes=memory.get("MemTotal", 0) << 10,
        free_bytes=_room_bytes(memory) or 0,
        distances=tuple((node, int(value)) for node, value in zip(online, distances, strict=False)),
        access=tuple(_read_access(*one) for one in numbered(folder, "access")),
        huge_count=read_number(folder / _HUGE_PAGES / "nr_hugepages") or 0,
        huge_free_count=read_number(folder / _HUGE_PAGES / "free_hugepages") or 0,
    )


def _read_access(number: int, folder: Path) -> AccessClass:
    initiators = folder / "initiators"

    def rate(name: str) -> int | None:
        mib = read_number(initiators / name)  # The kernel's unit.
        return mib << 20 if mib else None  # 0 stands for "not told".

    return AccessClass(
        number=number,
        initiators=tuple(node for node, _ in numbered(initiators, "node")),
        read_bytes_per_second=rate("read_bandwidth"),
        write_bytes_per_second=rate("write_bandwidth"),
        read_latency_ns=read_number(initiators / "read_latency") or None,
        write_latency_ns=read_number(initiators / "write_latency") or None,
    )


def _kept_bytes(index: int, zones: str) -> int:
    """What the kernel keeps of a node's zones: the high watermark, and the most that is protected
    from allocations which could have come from a better zone. As in MemAvailable."""
    kept_pages = 0
    for section in re.split(r"^(?=Node )", zones, flags=re.MULTILINE):
        if section.startswith(f"Node {index}, zone "):
            high = re.search(r"^\s+high\s+(\d+)$", section, re.MULTILINE)
            protection = re.search(r"^\s+protection: \(([\d, ]+)\)$", section, re.MULTILINE)
            kept_pages += int(high[1]) if high else 0
            kept_pages += max(map(int, protection[1].split(","))) if protection else 0
    return kept_pages * mmap.PAGESIZE


def _room_bytes(memory: dict[str, int]) -> int | None:
    if "MemFree" not in memory:
        return None
    # File pages that nobody uses go at the first need.
    return (memory["MemFree"] + memory.get("Inactive(file)", 0)) << 10
