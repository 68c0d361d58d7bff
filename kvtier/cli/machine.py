"""What this machine has, as /sys and /proc tell: memory, nodes, dax devices, disks, GPUs, limits.

Nothing is opened and nothing measured, so that a recorded tree of another machine does as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvtier.cli.machine_disks import Disk, read_disks
from kvtier.io.budget import available_bytes, group_limit_bytes
from kvtier.io.dax import DaxDevice, read_dax_devices
from kvtier.io.nodes import Node, read_nodes
from kvtier.io.sysfs import names, read_fields, read_number, read_text

_VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}
# The first two bytes of a PCI class: VGA, 3D and other display controllers, accelerators.
_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)
_VGA_CLASS = 0x0300
_NVIDIA = 0x10DE


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that may run an engine: none that a processor brings along for the screen."""

    pci_bus: str
    vendor: str
    model: str  # Empty: no driver tells.
    node: int | None  # The NUMA node that it hangs on.


@dataclass(frozen=True, slots=True)
class HugePages:
    """What slabs can hope for."""

    reserved_count: int  # Of 2 MiB.
    free_count: int
    shared_memory: str  # transparent_hugepage/shmem_enabled: never, advise, …; empty: unknown.


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that `kvtier probe` knows."""

    memory_bytes: int
    available_bytes: int | None  # The control group's room counts.
    group_limit_bytes: int | None  # None: no limit.
    memlock_bytes: int | None  # None: no limit.
    has_demotion: bool  # The kernel may move cold pages to slower nodes.
    huge_pages: HugePages
    nodes: tuple[Node, ...]
    dax_devices: tuple[DaxDevice, ...]
    disks: tuple[Disk, ...]
    gpus: tuple[Gpu, ...]

    @property
    def processor_nodes(self) -> list[Node]:
        return [node for node in self.nodes if node.cpus]

    @property
    def memory_only_nodes(self) -> list[Node]:
        return [node for node in self.nodes if node.has_only_memory]

    def nearest_nodes(self, gpu: Gpu) -> list[Node]:
        """Nodes with memory, the least distant from the GPU first; none where nobody tells."""
        home = next((node for node in self.nodes if node.index == gpu.node), None)
        if home is None:
            return []
        far = 255  # What the kernel says of a node that cannot be reached.
        with_memory = [node for node in self.nodes if node.memory_bytes > 0]
        return sorted(with_memory, key=lambda node: home.distance_to(node.index) or far)


def read_machine(root: Path = Path("/")) -> Machine:
    """The machine whose /sys and /proc are below `root`."""
    sysfs, proc = root / "sys", root / "proc"
    return Machine(
        memory_bytes=read_fields(proc / "meminfo").get("MemTotal", 0) << 10,
        available_bytes=available_bytes(proc, sysfs / "fs/cgroup"),
        group_limit_bytes=group_limit_bytes(proc, sysfs / "fs/cgroup"),
        memlock_bytes=_memlock_bytes(proc),
        has_demotion=read_text(sysfs / "kernel/mm/numa/demotion_enabled") in ("true", "1"),
        huge_pages=_huge_pages(sysfs / "kernel/mm"),
        nodes=tuple(read_nodes(sysfs)),
        dax_devices=tuple(read_dax_devices(sysfs)),
        disks=tuple(read_disks(sysfs, proc)),
        gpus=tuple(_gpus(sysfs, proc)),
    )


def _memlock_bytes(proc: Path) -> int | None:
    found = re.search(r"^Max locked memory +(\d+)", read_text(proc / "self/limits") or "", re.M)
    return int(found[1]) if found else None


def _huge_pages(folder: Path) -> HugePages:
    reserve = folder / "hugepages/hugepages-2048kB"
    setting = read_text(folder / "transparent_hugepage/shmem_enabled") or ""
    return HugePages(
        reserved_count=read_number(reserve / "nr_hugepages") or 0,
        free_count=read_number(reserve / "free_hugepages") or 0,
        shared_memory=setting.partition("[")[2].partition("]")[0],
    )


def _gpus(sysfs: Path, proc: Path) -> list[Gpu]:
    folder = sysfs / "bus/pci/devices"
    found = []
    for bus in names(folder):
        vendor = read_number(folder / bus / "vendor") or 0
        pci_class = (read_number(folder / bus / "class") or 0) >> 8
        # VGA of the others is what drives the screen, in the processor or beside it.
        is_screen = pci_class == _VGA_CLASS and vendor != _NVIDIA
        if vendor not in _VENDORS or pci_class not in _CLASSES or is_screen:
            continue
        information = read_text(proc / "driver/nvidia/gpus" / bus / "information") or ""
        model = re.search(r"^Model:\s*(.+)$", information, re.M)
        node = read_number(folder / bus / "numa_node")
        found.append(
            Gpu(
                pci_bus=bus,
                vendor=_VENDORS[vendor],
                model=model[1].strip() if model else "",
                node=None if node is None or node < 0 else node,
            )
        )
    return found
