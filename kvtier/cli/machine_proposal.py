"""A configuration file for a machine, each line with its reason; pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvtier.cli.machine import Machine
from kvtier.cli.machine_disks import DiskKind
from kvtier.cli.output import bytes_text
from kvtier.io.nodes import Node

MIB = 1 << 20
GIB = 1 << 30

_SHARE_WITH_GPUS = 2
_SHARE_WITHOUT = 4
# Pages that the daemon leaves to others when it populates slabs, and its own 200 MiB.
_RESERVE_BYTES = 512 * MIB
_TABLE_HEADER = "# Proposed by `kvtier probe` for what it found on this machine."


@dataclass(frozen=True, slots=True)
class ProposedOption:
    """One option; `value` is a TOML value. One that cannot be set yet is written as a comment."""

    section: str
    name: str
    value: str
    reason: str
    is_set: bool = True


@dataclass(frozen=True, slots=True)
class Proposal:
    """What to write, and what somebody should know or do besides."""

    options: tuple[ProposedOption, ...]
    notes: tuple[str, ...]

    def toml(self) -> str:
        lines = [_TABLE_HEADER]
        for section in dict.fromkeys(option.section for option in self.options):
            options = [option for option in self.options if option.section == section]
            mark = "" if any(option.is_set for option in options) else "# "
            lines += ["", f"{mark}[{section}]"]
            for option in options:
                lines.append(f"# {option.reason}")
                lines.append(f"{'' if option.is_set else '# '}{option.name} = {option.value}")
        if self.notes:
            lines += ["", *(f"# {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"


def propose(machine: Machine) -> Proposal:
    options: list[ProposedOption] = []
    notes: list[str] = []
    _propose_dram(machine, options, notes)
    _propose_cxl(machine, options)
    _propose_nvme(machine, options, notes)
    _note_pages(machine, notes)
    return Proposal(tuple(options), tuple(notes))


def _propose_dram(machine: Machine, options: list[ProposedOption], notes: list[str]) -> None:
    room_bytes, whose = _dram_room(machine)
    if room_bytes is None:
        notes.append("Nobody tells how much memory is available: set dram.bytes yourself.")
        return
    nodes, why = _dram_nodes(machine)
    if nodes:
        room_bytes = min(room_bytes, len(nodes) * min(node.free_bytes for node in nodes))
        whose = f"{whose} on {_names(nodes)}"
    share = _SHARE_WITH_GPUS if machine.gpus else _SHARE_WITHOUT
    budget_bytes = _rounded(max(0, room_bytes - _RESERVE_BYTES) // share)
    if budget_bytes < 2 * MIB:
        notes.append(f"{bytes_text(room_bytes)} of memory are too few for a DRAM tier.")
        return
    words = {
        _SHARE_WITH_GPUS: "half of it, since engines here keep their weights on GPUs",
        _SHARE_WITHOUT: "a quarter of it, since engines without a GPU need the rest themselves",
    }
    options.append(
        ProposedOption(
            "dram",
            "bytes",
            json.dumps(_size_text(budget_bytes)),
            f"{bytes_text(room_bytes)} are available{whose}: {words[share]}.",
        )
    )
    if nodes:
        numbers = json.dumps([node.index for node in nodes])
        options.append(ProposedOption("dram", "nodes", numbers, why))


def _dram_room(machine: Machine) -> tuple[int | None, str]:
    """Memory that a DRAM tier may take, without what lies on nodes without processors."""
    if machine.available_bytes is None:
        return None, ""
    slow_bytes = sum(node.free_bytes for node in machine.memory_only_nodes)
    fast_bytes = sum(node.free_bytes for node in machine.processor_nodes)
    if not slow_bytes:
        return machine.available_bytes, ""
    return min(machine.available_bytes, fast_bytes), " beside processors"


def _dram_nodes(machine: Machine) -> tuple[tuple[Node, ...], str]:
    """The nodes to bind the tier to, where some are clearly the best."""
    processors = tuple(machine.processor_nodes)
    if machine.memory_only_nodes and len(processors) == 1:
        return processors, (
            "The only node with processors: without this, slabs may come to lie on the slower "
            "nodes."
        )
    indexes = {gpu.node for gpu in machine.gpus}
    homes = tuple(node for node in processors if node.index in indexes)
    if len(processors) > 1 and None not in indexes and len(homes) == len(indexes):
        if len(homes) == 1:
            return homes, "All GPUs hang on this node; copies to the other sockets are slower."
        return homes, (
            "GPUs hang on each of these; a worker's blocks go to the node of its own, as copies "
            "between sockets are slower."
        )
    return (), ""


def _names(nodes: tuple[Node, ...]) -> str:
    numbers = ", ".join(str(node.index) for node in nodes)
    return f"node {numbers}" if len(nodes) == 1 else f"nodes {numbers}"


def _propose_cxl(machine: Machine, options: list[ProposedOption]) -> None:
    """One tier at most; the others, and devices that somebody may want else, as comments."""
    largest = max(machine.memory_only_nodes, key=lambda node: node.memory_bytes, default=None)
    for node in machine.memory_only_nodes:
        reason = (
            f"Node {node.index} has {bytes_text(node.memory_bytes)} and no processors"
            f"{_distance_text(machine, node)}{_speed_text(node)}: such as CXL memory."
        )
        is_set = node is largest
        options.append(ProposedOption("cxl", "node", str(node.index), reason, is_set=is_set))
    for device in machine.dax_devices:
        if device.is_mappable:
            path = str(device.path)
            reason = (
                f"{bytes_text(device.size_bytes)}, in steps of {bytes_text(device.align_bytes)}. "
                f"First, if it holds nothing that is needed: kvtier format {path}"
            )
            options.append(ProposedOption("cxl", "dax", json.dumps(path), reason, is_set=False))


def _propose_nvme(machine: Machine, options: list[ProposedOption], notes: list[str]) -> None:
    """As comments: the daemon starts with devices only that have been formatted for it."""
    free = [disk for disk in machine.disks if disk.kind is DiskKind.NVME and not disk.used_by]
    if free:
        paths = [disk.path for disk in free]
        total = bytes_text(sum(disk.size_bytes for disk in free))
        reason = (
            f"{len(free)} NVMe disk(s) that nobody uses, {total} in all. First, if they hold "
            f"nothing that is needed: kvtier format {' '.join(paths)}"
        )
        options.append(ProposedOption("nvme", "paths", json.dumps(paths), reason, is_set=False))
        return
    if any(disk.kind is DiskKind.NVME for disk in machine.disks):
        notes.append(
            "Every NVMe disk is in use: a file on a local file system of one can be an NVMe tier "
            '([nvme] paths = ["/var/lib/kvtier/pool"], bytes = "200GiB").'
        )


def _note_pages(machine: Machine, notes: list[str]) -> None:
    pages = machine.huge_pages
    if not pages.free_count and pages.shared_memory in ("never", "deny"):
        notes.append(
            "Huge pages for shared memory are off; slabs then become huge after the fact, where "
            "the kernel can do that (Linux 6.1). At once it goes with: echo advise > "
            "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
        )
    if machine.has_demotion and machine.memory_only_nodes:
        notes.append(
            "numa/demotion_enabled is on: under memory pressure the kernel may move the tier's "
            "pages to slower nodes; `kvtier check` tells when it has."
        )


def _distance_text(machine: Machine, node: Node) -> str:
    near = [
        (distance, one.index)
        for one in machine.processor_nodes
        if (distance := one.distance_to(node.index)) is not None
    ]
    if not near:
        return ""
    distance, index = min(near)
    return f", at distance {distance} from node {index}"


def _speed_text(node: Node) -> str:
    access = node.from_processors
    if access is None or access.read_bytes_per_second is None:
        return ""
    return f", {access.read_bytes_per_second / 1e9:.1f} GB/s as its firmware says"


def _size_text(count: int) -> str:
    """As the configuration writes it."""
    return f"{count // MIB}MiB" if count % GIB else f"{count // GIB}GiB"


def _rounded(count: int) -> int:
    """Down to whole GiB, or to 64 MiB where that would lose much."""
    unit = GIB if count >= 4 * GIB else 64 * MIB if count >= 256 * MIB else 2 * MIB
    return count // unit * unit
