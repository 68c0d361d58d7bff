"""A machine for people: a table for each kind of thing that it has."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.cli.machine import Machine
from kvtier.cli.output import bytes_text, table
from kvtier.io.nodes import Node


def machine_text(machine: Machine, measured: Mapping[str, object]) -> str:
    parts = [_memory_text(machine), _nodes_text(machine)]
    if machine.dax_devices:
        parts.append(_dax_text(machine))
    if machine.disks:
        parts.append(_disks_text(machine))
    if machine.gpus:
        parts.append(_gpus_text(machine))
    if measured:
        rows = [(name, value) for name, value in measured.items()]
        parts.append(table(("measured", "result"), rows))
    return "\n\n".join(parts)


def _memory_text(machine: Machine) -> str:
    pages = machine.huge_pages
    rows = [
        ("memory", bytes_text(machine.memory_bytes)),
        ("available", _bytes_or(machine.available_bytes, "not told")),
        ("limit of the control group", _bytes_or(machine.group_limit_bytes, "none")),
        ("memlock limit", _bytes_or(machine.memlock_bytes, "none")),
        ("huge pages reserved", f"{pages.reserved_count} of 2 MiB, {pages.free_count} free"),
        ("huge pages for shared memory", pages.shared_memory or "not told"),
        ("demotion to slower nodes", "on" if machine.has_demotion else "off"),
    ]
    return table(("", ""), rows).lstrip("\n")


def _nodes_text(machine: Machine) -> str:
    if not machine.nodes:
        return "The kernel tells nothing of NUMA nodes."
    rows = [
        (
            str(node.index),
            str(len(node.cpus)) if node.cpus else "none",
            bytes_text(node.memory_bytes),
            bytes_text(node.free_bytes),
            " ".join(str(distance) for _, distance in node.distances),
            _hmat_text(node),
        )
        for node in machine.nodes
    ]
    return table(("node", "CPUs", "memory", "free", "distances", "firmware (HMAT)"), rows)


def _hmat_text(node: Node) -> str:
    access = node.from_processors
    if access is None:
        return "-"
    rate, latency = access.read_bytes_per_second, access.read_latency_ns
    known = [
        f"{rate / 1e9:.1f} GB/s" if rate else "",
        f"{latency} ns" if latency else "",
    ]
    return ", ".join(text for text in known if text) or "-"


def _dax_text(machine: Machine) -> str:
    rows = [
        (
            device.path,
            bytes_text(device.size_bytes),
            bytes_text(device.align_bytes),
            _or(device.target_node, "-"),
            device.driver or "none",
        )
        for device in machine.dax_devices
    ]
    return table(("dax device", "size", "alignment", "node", "driver"), rows)


def _disks_text(machine: Machine) -> str:
    rows = [
        (
            disk.path,
            disk.kind,
            bytes_text(disk.size_bytes),
            f"{rate / 1e9:.1f} GB/s" if (rate := disk.link_bytes_per_second) else "-",
            _or(disk.node, "-"),
            disk.used_by or "nobody",
            disk.model,
        )
        for disk in machine.disks
    ]
    return table(("disk", "kind", "size", "link", "node", "used by", "model"), rows)


def _gpus_text(machine: Machine) -> str:
    rows = [
        (
            gpu.pci_bus,
            f"{gpu.vendor} {gpu.model}".strip(),
            _or(gpu.node, "-"),
            " ".join(str(node.index) for node in machine.nearest_nodes(gpu)) or "-",
        )
        for gpu in machine.gpus
    ]
    return table(("GPU", "model", "node", "memory, nearest first"), rows)


def _bytes_or(count: int | None, otherwise: str) -> str:
    return otherwise if count is None else bytes_text(count)


def _or(value: int | None, otherwise: str) -> str:
    return otherwise if value is None else str(value)
