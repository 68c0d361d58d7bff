"""Launches kernels on a device with what tests give to the host twin, and compares as they do.

Every memory gets an allocation of its own with guards on both sides: a kernel that writes beside
one is found out, though not as early as by the twin's sanitizers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtier.cuda.cudart import open_cudart
from kvtier.cuda.kernel_cache import KernelCache, NvrtcCompiler
from kvtier.cuda.runtime import CudaRuntime, Direction, Function, KernelLaunch, Ranges
from tests.support.kernel_twin import Address, Array, HostMemory, reachable

GUARD_BYTES = 512
_GUARD = 0xA5
_UP, _DOWN = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


class KernelDevice:
    """As `KernelTwin`, on a GPU, or on a fake one that knows the kernel by a twin of its own."""

    def __init__(self, runtime: CudaRuntime, image_of: Callable[[str], bytes]) -> None:
        """`image_of` gives the cubin of a source by its name."""
        self._runtime = runtime
        self._image_of = image_of
        self._functions: dict[str, Function] = {}
        self._stream = runtime.create_stream(runtime.priorities()[0])

    def launch(
        self,
        name: str,
        *arguments: int | Address,
        grid_count: int = 2,
        block_threads: int = 64,
    ) -> None:
        first, *memories = reachable(HostMemory.table(arguments))
        starts = {id(memory): self._allocate(memory) for memory in memories}
        try:
            places = {
                id(memory): starts[id(memory)] + GUARD_BYTES + memory.misalignment
                for memory in memories
            }
            for memory in memories:
                self._upload(starts[id(memory)], _guarded(memory, _resolved(memory, places)))
            touched = Ranges.of(
                *((places[id(memory)], max(1, len(memory.data))) for memory in memories)
            )
            self._runtime.launch(
                KernelLaunch(
                    self._function(name),
                    grid_count,
                    block_threads,
                    _resolved(first, places).view(np.uint64).tolist(),
                    reads=touched,
                    writes=touched,
                ),
                self._stream,
            )
            for memory in memories:
                self._download(starts[id(memory)], memory, places)
        finally:
            self._runtime.synchronize_stream(self._stream)
            for start in starts.values():
                self._runtime.free_device(start)

    def close(self) -> None:
        self._runtime.destroy_stream(self._stream)

    def _function(self, name: str) -> Function:
        if name not in self._functions:
            is_attention = name.startswith(("paged_attention", "merge_splits"))
            image = self._image_of("paged_attention" if is_attention else "kv_copy")
            self._functions[name] = self._runtime.load_function(image, name)
        return self._functions[name]

    def _allocate(self, memory: HostMemory) -> int:
        return self._runtime.allocate_device(len(_guarded(memory, memory.data)))

    def _upload(self, start: int, data: Array) -> None:
        self._runtime.copy(start, data.ctypes.data, len(data), _UP, self._stream)
        self._runtime.synchronize_stream(self._stream)

    def _download(self, start: int, memory: HostMemory, places: dict[int, int]) -> None:
        expected = _guarded(memory, _resolved(memory, places))
        found = np.empty_like(expected)
        self._runtime.copy(found.ctypes.data, start, len(found), _DOWN, self._stream)
        self._runtime.synchronize_stream(self._stream)
        first = GUARD_BYTES + memory.misalignment
        inside = slice(first, first + len(memory.data))
        data = found[inside].copy()
        found[inside] = expected[inside]
        assert (found == expected).all(), "a kernel wrote beside its memory"
        if not memory.references:
            np.copyto(memory.data, data)


def open_device() -> KernelDevice:
    """The first GPU, its kernels compiled as for a user. Raises CudaUnavailable."""
    runtime = open_cudart()
    runtime.use_device(0)
    cache = KernelCache(None, NvrtcCompiler())
    capability = runtime.attributes(0).compute_capability
    return KernelDevice(runtime, lambda source: cache.cubin(source, capability))


def _guarded(memory: HostMemory, data: Array) -> Array:
    whole = np.full(2 * GUARD_BYTES + memory.misalignment + len(data), _GUARD, np.uint8)
    first = GUARD_BYTES + memory.misalignment
    whole[first : first + len(data)] = data
    return whole


def _resolved(memory: HostMemory, places: dict[int, int]) -> Array:
    """The bytes with addresses in the place of references."""
    data = memory.data.copy()
    for offset, target in memory.references:
        number = data[offset : offset + 8].view(np.uint64)
        number += np.uint64(places[id(target)])
    return data
