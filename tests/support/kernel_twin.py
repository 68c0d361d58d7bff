"""The kernels' host twin: built by g++ under sanitizers, run as a filter; see host_twin.cpp.

A launch takes the numbers that it takes on a GPU. Memory belongs to the test; an `Address` stands
for a place in it, in arguments and in tables.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
BUILD_FLAGS = [
    *("-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
]

Array = npt.NDArray[Any]


class TwinDied(Exception):
    """A sanitizer ended the twin, or it refused; the message is its report."""


@dataclass(eq=False)
class HostMemory:
    """Bytes that a launch reads and writes; `data` is what they are after it."""

    data: npt.NDArray[np.uint8]
    misalignment: int = 0  # Of its first byte, from a multiple of 256.
    references: list[tuple[int, HostMemory]] = field(default_factory=list)

    @classmethod
    def of(cls, array: Array, misalignment: int = 0) -> HostMemory:
        return cls(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy(), misalignment)

    @classmethod
    def zeros(cls, length_bytes: int, misalignment: int = 0) -> HostMemory:
        return cls(np.zeros(length_bytes, np.uint8), misalignment)

    @classmethod
    def table(cls, *columns: Sequence[int | Address] | Array) -> HostMemory:
        """Columns of 64-bit numbers, one after another."""
        numbers = [number for column in columns for number in column]
        values = [
            int(number.offset if isinstance(number, Address) else number) % (1 << 64)
            for number in numbers
        ]
        table = cls.of(np.array(values, np.uint64))
        table.references = [
            (8 * place, number.memory)
            for place, number in enumerate(numbers)
            if isinstance(number, Address)
        ]
        return table

    def at(self, offset: int = 0) -> Address:
        return Address(self, int(offset))

    def column(self, offsets: Array) -> list[Address]:
        return [self.at(offset) for offset in offsets.tolist()]


@dataclass(frozen=True, eq=False)
class Address:
    memory: HostMemory
    offset: int = 0


class KernelLauncher(Protocol):
    """Runs kernels: the twin on the host, or a device."""

    def launch(
        self,
        name: str,
        *arguments: int | Address,
        grid_count: int = 2,
        block_threads: int = 64,
    ) -> None:
        """Run it to its end; what it wrote is in the memories."""
        ...


def has_compiler() -> bool:
    return shutil.which("g++") is not None


def build(folder: Path) -> Path:
    binary = folder / "host_twin"
    subprocess.run(
        ["g++", *BUILD_FLAGS, "-o", str(binary), str(KERNELS / "host_twin.cpp")], check=True
    )
    return binary


class KernelTwin:
    """One process of the twin, started when there is a launch for it."""

    def __init__(self, binary: Path) -> None:
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        self._report = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it.

    def launch(
        self,
        name: str,
        *arguments: int | Address,
        grid_count: int = 2,
        block_threads: int = 64,
    ) -> None:
        """Run it to its end; raises TwinDied."""
        memories = reachable(HostMemory.table(arguments))
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(_request(name, grid_count, block_threads, memories))
            process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        for memory in memories:
            answer = process.stdout.read(len(memory.data))
            if len(answer) != len(memory.data):
                raise self._died()
            if not memory.references:  # Tables come back with addresses in them.
                np.copyto(memory.data, np.frombuffer(answer, np.uint8))

    def close(self) -> None:
        self._stop()
        self._report.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._report.truncate(0)
            self._process = subprocess.Popen(
                [str(self._binary)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._report,
            )
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            try:
                self._process.communicate(timeout=30)
            except BrokenPipeError:
                self._process.wait(30)
            self._process = None

    def _died(self) -> TwinDied:
        self._stop()
        self._report.seek(0)
        return TwinDied(self._report.read().decode(errors="replace"))


def reachable(arguments: HostMemory) -> list[HostMemory]:
    """The arguments first, then whatever they refer to, directly or through tables."""
    found = [arguments]
    for memory in found:  # Grows while it is walked.
        for _, target in memory.references:
            if not any(target is known for known in found):
                found.append(target)
    return found


def _request(
    name: str, grid_count: int, block_threads: int, memories: Sequence[HostMemory]
) -> bytes:
    def numbers(*values: int) -> bytes:
        return struct.pack(f"<{len(values)}Q", *values)

    parts = [numbers(len(name)), name.encode(), numbers(grid_count, block_threads, len(memories))]
    for memory in memories:
        parts += [numbers(len(memory.data), memory.misalignment), memory.data.tobytes()]
    ranks = {id(memory): rank for rank, memory in enumerate(memories)}
    references = [
        numbers(rank, offset, ranks[id(target)])
        for rank, memory in enumerate(memories)
        for offset, target in memory.references
    ]
    return b"".join([*parts, numbers(len(references)), *references])
