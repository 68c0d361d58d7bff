"""CUDA by ctypes. Importing this module loads nothing; `open_cudart` does.

Every call releases the GIL. Errors that are not final are taken out of the thread at once
(`cudaGetLastError`), or the engine's torch would report them as its own at its next launch.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any

import numpy as np

from kvtier.cuda.entry_points import CopyAttributes, EntryPoints
from kvtier.cuda.errors import (
    STICKY_CODES,
    CudaBroken,
    CudaCode,
    CudaRefused,
    CudaUnavailable,
    RegistrationRefused,
    error_of,
)
from kvtier.cuda.libraries import open_library
from kvtier.cuda.runtime import (
    Addresses,
    DeviceAttributes,
    Direction,
    Event,
    Function,
    KernelLaunch,
    SourceOrder,
    Stream,
    check_batch,
)
from kvtier.errors import KVTierError

BATCH_VARIABLE = "KVTIER_CUDA_BATCH"
"""`0` does without batches: some drivers were seen to be unstable with them."""

_STREAM_NON_BLOCKING = 1
_EVENT_WITHOUT_TIMING = 2
_REGISTER_PORTABLE_MAPPED = 1 | 2
_PREFER_OVERLAP = 1  # Use copy engines, not SMs.

_ATTRIBUTES = {
    "compute_major": 75,
    "compute_minor": 76,
    "multiprocessor_count": 16,
    "copy_engine_count": 40,
    "can_use_host_address": 91,
    "can_register_host": 99,
    "numa_node": 134,  # Since CUDA 12.2.
}


def open_cudart(path: str | None = None) -> Cudart:
    """Raises CudaUnavailable, saying why, where there is no usable CUDA."""
    return Cudart(
        EntryPoints(open_library(path)), use_batches=os.environ.get(BATCH_VARIABLE) != "0"
    )


class Cudart:
    """`CudaRuntime` on a GPU."""

    def __init__(self, entry_points: EntryPoints, *, use_batches: bool = True) -> None:
        self._entry_points = entry_points
        self._calls = entry_points.calls
        self._batch = entry_points.batch_call() if use_batches else None
        self._broken: int | None = None  # The code of the failure that ended it all.
        self._modules: dict[bytes, int] = {}
        self._launch_call: Any = None

    # ------------------------------------------------------------------------------------ devices

    def device_count(self) -> int:
        count = c_int()
        self._call("cudaGetDeviceCount", byref(count))
        return count.value

    def attributes(self, device: int) -> DeviceAttributes:
        values = {name: self._attribute(number, device) for name, number in _ATTRIBUTES.items()}
        bus = ctypes.create_string_buffer(64)
        self._call("cudaDeviceGetPCIBusId", bus, len(bus), device)
        node = values["numa_node"]
        return DeviceAttributes(
            pci_bus=bus.value.decode(),
            compute_capability=(values["compute_major"] or 0, values["compute_minor"] or 0),
            multiprocessor_count=values["multiprocessor_count"] or 0,
            copy_engine_count=values["copy_engine_count"] or 0,
            can_register_host=values["can_register_host"] == 1,
            can_use_host_address=values["can_use_host_address"] == 1,
            numa_node=node if node is not None and node >= 0 else None,
        )

    def use_device(self, device: int) -> None:
        self._call("cudaSetDevice", device)

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self._call("cudaMemGetInfo", byref(free), byref(total))
        return free.value

    def take_error(self) -> int:
        return int(self._calls["cudaGetLastError"]())

    # ------------------------------------------------------------------------- streams and events

    def priorities(self) -> tuple[int, int]:
        lowest, highest = c_int(), c_int()
        self._call("cudaDeviceGetStreamPriorityRange", byref(lowest), byref(highest))
        return lowest.value, highest.value

    def create_stream(self, priority: int) -> Stream:
        return Stream(self._made("cudaStreamCreateWithPriority", _STREAM_NON_BLOCKING, priority))

    def destroy_stream(self, stream: Stream) -> None:
        self._call("cudaStreamDestroy", stream)

    def synchronize_stream(self, stream: Stream) -> None:
        self._call("cudaStreamSynchronize", stream)

    def create_event(self, *, with_timing: bool = False) -> Event:
        return Event(
            self._made("cudaEventCreateWithFlags", 0 if with_timing else _EVENT_WITHOUT_TIMING)
        )

    def destroy_event(self, event: Event) -> None:
        self._call("cudaEventDestroy", event)

    def record_event(self, event: Event, stream: Stream) -> None:
        self._call("cudaEventRecord", event, stream)

    def wait_event(self, stream: Stream, event: Event) -> None:
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def is_event_done(self, event: Event) -> bool:
        try:
            self._call("cudaEventQuery", event)
        except CudaRefused as error:
            if error.code == CudaCode.NOT_READY:
                return False
            raise
        return True

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        milliseconds = ctypes.c_float()
        self._call("cudaEventElapsedTime", byref(milliseconds), start, end)
        return milliseconds.value / 1e3

    # ------------------------------------------------------------------------------------- memory

    def allocate_device(self, length_bytes: int) -> int:
        return self._made("cudaMalloc", length_bytes)

    def free_device(self, address: int) -> None:
        self._call("cudaFree", address)

    def register_host(self, address: int, length_bytes: int) -> None:
        try:
            self._call("cudaHostRegister", address, length_bytes, _REGISTER_PORTABLE_MAPPED)
        except CudaBroken:
            raise
        except CudaRefused as error:
            raise RegistrationRefused(f"{length_bytes} bytes at {address:#x}: {error}") from error

    def unregister_host(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def device_address(self, host_address: int) -> int:
        return self._made("cudaHostGetDevicePointer", host_address, 0)

    # ---------------------------------------------------------------------------- copies, kernels

    @property
    def has_batches(self) -> bool:
        return self._batch is not None

    def copy(
        self, target: int, source: int, length_bytes: int, direction: Direction, stream: Stream
    ) -> None:
        self._call("cudaMemcpyAsync", target, source, length_bytes, int(direction), stream)

    def copy_batch(
        self,
        targets: Addresses,
        sources: Addresses,
        sizes: Addresses,
        order: SourceOrder,
        stream: Stream,
    ) -> None:
        check_batch(targets, sources, sizes, stream)
        if not len(sizes):
            return
        if self._batch is None:
            raise CudaRefused("cuMemcpyBatchAsync", CudaCode.NOT_SUPPORTED, "copy one by one")
        call, argument_count = self._batch
        attributes = CopyAttributes(source_order=int(order), flags=_PREFER_OVERLAP)
        first, failed = c_size_t(0), c_size_t(0)
        columns = [np.ascontiguousarray(column) for column in (targets, sources, sizes)]
        self._run(
            "cuMemcpyBatchAsync",
            call,
            *(c_void_p(column.ctypes.data) for column in columns),
            len(sizes),
            byref(attributes),
            byref(first),
            1,
            *([byref(failed)] if argument_count == 9 else []),
            stream,
        )

    def load_function(self, image: bytes, name: str) -> Function:
        module = self._modules.get(image)
        if module is None:
            module = self._modules[image] = self._driver_made("cuModuleLoadData", image)
        return Function(self._driver_made("cuModuleGetFunction", module, name.encode()))

    def launch(self, launch: KernelLaunch, stream: Stream) -> None:
        if self._launch_call is None:
            self._launch_call = self._driver_call("cuLaunchKernel")
        values = (ctypes.c_uint64 * len(launch.arguments))(*launch.arguments)
        pointers = (c_void_p * len(values))(
            *(ctypes.addressof(values) + 8 * index for index in range(len(values)))
        )
        self._run(
            "cuLaunchKernel",
            self._launch_call,
            launch.function,
            *(launch.grid_count, 1, 1),
            *(launch.block_threads, 1, 1),
            launch.shared_bytes,
            stream,
            pointers,
            None,
        )

    # ----------------------------------------------------------------------------------- helpers

    def _attribute(self, number: int, device: int) -> int | None:
        value = c_int()
        try:
            self._call("cudaDeviceGetAttribute", byref(value), number, device)
        except CudaRefused:
            return None
        return value.value

    def _made(self, name: str, *arguments: Any) -> int:
        """Of a call that hands out an address or handle through its first argument."""
        made = c_void_p()
        self._call(name, byref(made), *arguments)
        return made.value or 0

    def _driver_call(self, name: str) -> Any:
        call = self._entry_points.driver_call(name)
        if call is None:
            raise CudaUnavailable(f"the driver has no {name}: go without kernels")
        return call

    def _driver_made(self, name: str, *arguments: Any) -> int:
        made = c_void_p()
        self._run(name, self._driver_call(name), byref(made), *arguments)
        return made.value or 0

    def _call(self, name: str, *arguments: Any) -> None:
        self._run(name, self._calls[name], *arguments)

    def _run(self, name: str, function: Any, *arguments: Any) -> None:
        if self._broken is not None:
            raise CudaBroken(name, self._broken)
        code = function(*arguments)
        if code != CudaCode.SUCCESS:
            raise self._error(name, code)

    def _error(self, name: str, code: int) -> KVTierError:
        pending = self.take_error()
        # A copy that faulted is told by any later call, which may name a milder code.
        error = error_of(name, pending if pending in STICKY_CODES else code)
        if isinstance(error, CudaBroken):
            self._broken = error.code
        return error
