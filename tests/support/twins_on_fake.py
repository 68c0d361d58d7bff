"""The kernels' own arithmetic on a fake GPU: a launch runs in the host twin, under sanitizers.

Every allocation of the fake device is a memory of the twin's. A number anywhere in them that is the
address of one is taken for a reference: fake addresses are so high that no other number is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.cuda.fake import FakeCudart
from kvtier.cuda.fake_memory import DEVICE_FIRST, FakeMemory
from kvtier.cuda.runtime import Ranges
from kvtier.memory import Bytes
from tests.support.kernel_twin import Address, HostMemory, KernelLauncher


def add_host_twins(cuda: FakeCudart, kernels: KernelLauncher, names: Sequence[str]) -> None:
    for name in names:

        def twin(memory: FakeMemory, arguments: Sequence[int], name: str = name) -> None:
            _run(kernels, name, memory, arguments)

        cuda.add_twin(name, twin)


def _run(kernels: KernelLauncher, name: str, memory: FakeMemory, arguments: Sequence[int]) -> None:
    arrays: dict[int, Bytes] = memory.device._arrays
    memories = {start: HostMemory(array.copy()) for start, array in arrays.items()}
    for found in memories.values():
        whole = len(found.data) // 8 * 8
        numbers = found.data[:whole].view(np.uint64)
        for index in np.flatnonzero(numbers >= np.uint64(DEVICE_FIRST)).tolist():
            address = _address(memories, int(numbers[index]))
            if isinstance(address, Address):
                numbers[index] = address.offset
                found.references.append((8 * index, address.memory))
    kernels.launch(
        name, *(_address(memories, number) for number in arguments), grid_count=3, block_threads=128
    )
    writes: Ranges = vars(memory)["_declared"][1]
    for start, found in memories.items():
        if not found.references:
            _check_declared(name, arrays[start], found.data, start, writes)
            np.copyto(arrays[start], found.data)


def _check_declared(name: str, before: Bytes, after: Bytes, start: int, writes: Ranges) -> None:
    """A race is only found between ranges that launches own up to."""
    is_stray = before != after
    for first, size in zip(writes.starts.tolist(), writes.sizes.tolist(), strict=True):
        is_stray[max(0, first - start) : max(0, first + size - start)] = False
    assert not is_stray.any(), f"{name} did not declare all that it writes"


def _address(memories: dict[int, HostMemory], number: int) -> int | Address:
    for start, memory in memories.items():
        if start <= number < start + len(memory.data):
            return memory.at(number - start)
    return number
