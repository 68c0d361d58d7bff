"""Measures what `kvtier probe` otherwise only reads: copies between nodes, reads of disks."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvtier.cli.machine import Machine
from kvtier.clock import SystemClock
from kvtier.errors import ConfigError
from kvtier.io.alignment import aligned_buffer, open_direct
from kvtier.pools.slabs import Slab, punch_slab
from kvtier.pools.source import MemorySource
from kvtier.types import SlabId

# Large enough that no cache holds it.
COPY_BYTES = 64 << 20
COPY_SECONDS = 0.3
READ_BYTES = 8 << 20
READ_SECONDS = 0.5


def measure(machine: Machine) -> dict[str, object]:
    """GB/s, or the reason why it could not be measured, by what was measured."""
    return {**_measure_memory(machine), **_measure_disks(machine)}


def _measure_memory(machine: Machine) -> dict[str, object]:
    """One thread, from the nearest processors' memory to each node and back."""
    found: dict[str, object] = {}
    home = next((node.index for node in machine.processor_nodes), None)
    for node in machine.nodes:
        if node.memory_bytes == 0:
            continue
        slabs: list[Slab] = []
        try:
            slabs += [_slab(home), _slab(node.index)]
            down = _copy_rate(slabs[1], slabs[0])
            up = _copy_rate(slabs[0], slabs[1])
            found[f"copy node {home} to node {node.index}, GB/s"] = round(down / 1e9, 2)
            found[f"copy node {node.index} to node {home}, GB/s"] = round(up / 1e9, 2)
        except (OSError, ConfigError) as error:
            found[f"copy to node {node.index}"] = str(error)
        finally:
            for slab in slabs:
                punch_slab(slab)
    return found


def _rate(work: Callable[[int], object], length_bytes: int, seconds: float) -> float:
    """Bytes a second of the fastest call, after one that warms up: others have the machine too."""
    work(0)
    fastest = math.inf
    began = time.perf_counter()
    number = 1
    while (started := time.perf_counter()) - began < seconds:
        work(number)
        fastest = min(fastest, time.perf_counter() - started)
        number += 1
    return length_bytes / fastest


def _slab(node: int | None) -> Slab:
    return MemorySource(node).populate(
        SlabId(0), COPY_BYTES, clock=SystemClock(), is_cancelled=lambda: False
    )


def _copy_rate(target: Slab, source: Slab) -> float:
    return _rate(
        lambda _: np.copyto(target.mapping.array, source.mapping.array), COPY_BYTES, COPY_SECONDS
    )


def _measure_disks(machine: Machine) -> dict[str, object]:
    """One thread that reads on from the start: what a disk does for many calls at once is more."""
    found: dict[str, object] = {}
    for disk in machine.disks:
        name = f"read {disk.path}, one call at a time, GB/s"
        try:
            found[name] = round(_read_rate(Path(disk.path), disk.size_bytes) / 1e9, 2)
        except OSError as error:
            found[name] = error.strerror or str(error)
    return found


def _read_rate(path: Path, size_bytes: int) -> float:
    fd, _ = open_direct(path, os.O_RDONLY)
    try:
        buffer = aligned_buffer(READ_BYTES)
        places = max(1, size_bytes // READ_BYTES)
        began = time.perf_counter()
        read_bytes = number = 0
        while time.perf_counter() - began < READ_SECONDS:
            read_bytes += os.preadv(fd, [buffer], number % places * READ_BYTES)
            number += 1
        return read_bytes / (time.perf_counter() - began)
    finally:
        os.close(fd)
