"""/sys and /proc of machines that we do not have: what a probe reads there, file by file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class NodeTree:
    """A NUMA node as sysfs shows it."""

    cpus: str
    memory_gib: float
    free_gib: float
    distances: str
    idle_file_mib: int = 0


def write_tree(root: Path, files: Mapping[str, str]) -> None:
    """Files by path; a text that begins with `->` is a symbolic link."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("->"):
            path.symlink_to(text[2:])
        else:
            path.write_text(text + "\n")


def write_nodes(root: Path, nodes: Mapping[int, NodeTree]) -> None:
    for index, node in nodes.items():
        folder = f"sys/devices/system/node/node{index}"
        lines = [
            f"Node {index} MemTotal:    {int(node.memory_gib * MIB)} kB",
            f"Node {index} MemFree:     {int(node.free_gib * MIB)} kB",
            f"Node {index} Inactive(file): {node.idle_file_mib << 10} kB",
        ]
        write_tree(
            root,
            {
                f"{folder}/cpulist": node.cpus,
                f"{folder}/meminfo": "\n".join(lines),
                f"{folder}/distance": node.distances,
            },
        )


def write_memory(root: Path, *, total_gib: float, available_gib: float, limit: str = "max") -> None:
    """/proc/meminfo, a control group and the limits of a process."""
    write_tree(
        root,
        {
            "proc/meminfo": f"MemTotal: {int(total_gib * MIB)} kB\n"
            f"MemAvailable: {int(available_gib * MIB)} kB",
            "proc/self/cgroup": "0::/unit",
            "sys/fs/cgroup/unit/memory.max": limit,
            "sys/fs/cgroup/unit/memory.current": str(64 * MIB),
            "sys/fs/cgroup/unit/memory.stat": "inactive_file 0",
            "proc/self/limits": "Limit                     Soft Limit  Hard Limit  Units\n"
            "Max locked memory         8388608     8388608     bytes",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never]",
        },
    )


def write_nvme(root: Path, name: str, *, gib: int, number: str, node: int = 0) -> None:
    folder = f"sys/block/{name}"
    write_tree(
        root,
        {
            f"{folder}/size": str(gib * GIB // 512),
            f"{folder}/dev": number,
            f"{folder}/queue/rotational": "0",
            f"{folder}/device/model": "Fast Disk 9000",
            f"{folder}/device/device/numa_node": str(node),
            f"{folder}/device/device/current_link_speed": "16.0 GT/s PCIe",
            f"{folder}/device/device/current_link_width": "4",
        },
    )


def write_gpu(root: Path, bus: str, *, node: int) -> None:
    write_tree(
        root,
        {
            f"sys/bus/pci/devices/{bus}/vendor": "0x10de",
            f"sys/bus/pci/devices/{bus}/class": "0x030200",
            f"sys/bus/pci/devices/{bus}/numa_node": str(node),
            f"proc/driver/nvidia/gpus/{bus}/information": "Model: \t\t NVIDIA H200\nIRQ: 7",
        },
    )


def write_dax(root: Path, name: str, *, gib: float, driver: str = "device_dax") -> None:
    folder = f"sys/bus/dax/devices/{name}"
    write_tree(
        root,
        {
            f"{folder}/size": str(int(gib * GIB)),
            f"{folder}/align": str(2 * MIB),
            f"{folder}/target_node": "2",
            f"{folder}/numa_node": "0",
            f"{folder}/dev": "252:0",
            f"sys/bus/dax/drivers/{driver}/bind": "",
            f"{folder}/driver": f"->../../drivers/{driver}",
        },
    )


def laptop(root: Path) -> Path:
    """One node, one disk in use, a display controller of the processor's maker, no limits."""
    write_memory(root, total_gib=16, available_gib=10)
    write_nodes(root, {0: NodeTree("0-7", 16, 6, "10")})
    write_nvme(root, "nvme0n1", gib=512, number="259:0")
    write_tree(
        root,
        {
            "sys/block/nvme0n1/nvme0n1p1/partition": "1",
            "sys/block/loop0/size": "100",
            "sys/block/zram0/size": "100",
            "sys/bus/pci/devices/0000:00:02.0/vendor": "0x8086",
            "sys/bus/pci/devices/0000:00:02.0/class": "0x030000",
            "sys/bus/pci/devices/0000:00:02.0/numa_node": "-1",
        },
    )
    return root


def two_sockets_with_gpus(root: Path) -> Path:
    """Two sockets, GPUs on the second, two free NVMe disks, one with a file system on it whole."""
    write_memory(root, total_gib=1024, available_gib=900)
    nodes = {
        0: NodeTree("0-31", 512, 430, "10 21"),
        1: NodeTree("32-63", 512, 470, "21 10"),
    }
    write_nodes(root, nodes)
    for number in range(4):
        write_gpu(root, f"0000:8{number}:00.0", node=1)
    for number in range(3):
        write_nvme(root, f"nvme{number}n1", gib=3500, number=f"259:{number}", node=number % 2)
    write_tree(
        root,
        {
            "proc/self/mountinfo": "22 1 259:0 / /data rw - xfs /dev/nvme0n1 rw",
            "proc/swaps": "Filename Type Size Used Priority",
            "sys/block/nvme1c1n1/size": "100",
            "sys/block/nvme1c1n1/hidden": "1",
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "2048",
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "2000",
        },
    )
    return root


def cxl_node(root: Path) -> Path:
    """One socket and CXL memory as a node without processors, with HMAT and demotion."""
    write_memory(root, total_gib=384, available_gib=350)
    nodes = {0: NodeTree("0-63", 256, 230, "10 20"), 1: NodeTree("", 128, 120, "20 10")}
    write_nodes(root, nodes)
    access = "sys/devices/system/node/node1/access1/initiators"
    write_tree(
        root,
        {
            f"{access}/read_bandwidth": "28000",
            f"{access}/read_latency": "270",
            f"{access}/node0/online": "1",
            "sys/kernel/mm/numa/demotion_enabled": "true",
        },
    )
    return root


def cxl_device(root: Path) -> Path:
    """One socket and CXL memory as a dax device, and another that is system memory already."""
    write_memory(root, total_gib=64, available_gib=60, limit=str(32 * GIB))
    write_nodes(root, {0: NodeTree("0-15", 64, 60, "10")})
    write_dax(root, "dax0.0", gib=128)
    write_dax(root, "dax1.0", gib=64, driver="kmem")
    return root


SHAPES = {
    "laptop": laptop,
    "two sockets with GPUs": two_sockets_with_gpus,
    "CXL node": cxl_node,
    "CXL device": cxl_device,
}
