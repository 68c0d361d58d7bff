"""The C functions behind `Cudart`, with their types; a wrong arity would end the process.

`cudaMemcpyBatchAsync` took nine arguments in CUDA 12.8 and 12.9 and takes eight in 13, under one
name. So it is asked of the driver first, as of version 12.8: that form (nine arguments, with
failIdx) every later driver keeps. Where the driver cannot be asked, the runtime's own function is
called with as many arguments as its version has. Other versions go without batches.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

from kvtier.cuda.errors import CudaUnavailable
from kvtier.cuda.libraries import MAJORS

_STREAM = c_void_p
_EVENT = c_void_p
_INT_OUT = POINTER(c_int)
_ADDRESS_OUT = POINTER(c_void_p)

RUNTIME_CALLS: dict[str, list[Any]] = {
    "cudaRuntimeGetVersion": [_INT_OUT],
    "cudaDriverGetVersion": [_INT_OUT],
    "cudaGetDeviceCount": [_INT_OUT],
    "cudaSetDevice": [c_int],
    "cudaDeviceGetAttribute": [_INT_OUT, c_int, c_int],
    "cudaDeviceGetPCIBusId": [c_char_p, c_int, c_int],
    "cudaMemGetInfo": [POINTER(c_size_t), POINTER(c_size_t)],
    "cudaGetLastError": [],
    "cudaDeviceGetStreamPriorityRange": [_INT_OUT, _INT_OUT],
    "cudaStreamCreateWithPriority": [_ADDRESS_OUT, c_uint, c_int],
    "cudaStreamDestroy": [_STREAM],
    "cudaStreamSynchronize": [_STREAM],
    "cudaStreamWaitEvent": [_STREAM, _EVENT, c_uint],
    "cudaEventCreateWithFlags": [_ADDRESS_OUT, c_uint],
    "cudaEventDestroy": [_EVENT],
    "cudaEventRecord": [_EVENT, _STREAM],
    "cudaEventQuery": [_EVENT],
    "cudaEventElapsedTime": [POINTER(ctypes.c_float), _EVENT, _EVENT],
    "cudaMalloc": [_ADDRESS_OUT, c_size_t],
    "cudaFree": [c_void_p],
    "cudaHostRegister": [c_void_p, c_size_t, c_uint],
    "cudaHostUnregister": [c_void_p],
    "cudaHostGetDevicePointer": [_ADDRESS_OUT, c_void_p, c_uint],
    "cudaMemcpyAsync": [c_void_p, c_void_p, c_size_t, c_int, _STREAM],
}

BATCH_SINCE = 12080
_PROC_SINCE = 12000
_RUNTIME_FORMS = {12: 9, 13: 8}  # Arguments of cudaMemcpyBatchAsync, by major version.


class Location(ctypes.Structure):
    """CUmemLocation: a hint, which nothing here gives."""

    _fields_ = [("type", c_int), ("number", c_int)]


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes and cudaMemcpyAttributes, which are the same."""

    _fields_ = [
        ("source_order", c_int),
        ("source_hint", Location),
        ("target_hint", Location),
        ("flags", c_uint),
    ]


_BATCH = [
    *(c_void_p, c_void_p, c_void_p, c_size_t),  # targets, sources, sizes, count
    *(POINTER(CopyAttributes), POINTER(c_size_t), c_size_t),
]
DRIVER_CALLS: dict[str, list[Any]] = {
    "cuMemcpyBatchAsync": [*_BATCH, POINTER(c_size_t), _STREAM],
    "cuModuleLoadData": [_ADDRESS_OUT, c_char_p],
    "cuModuleGetFunction": [_ADDRESS_OUT, c_void_p, c_char_p],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, _STREAM, POINTER(c_void_p), POINTER(c_void_p)],
}


class EntryPoints:
    """Functions by name, each looked up once; those of the driver may be absent."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises CudaUnavailable for a library that is no libcudart, or of an unknown version."""
        self._library = library
        self.calls = {name: self._runtime_call(name, RUNTIME_CALLS[name]) for name in RUNTIME_CALLS}
        self.runtime_version = self._version("cudaRuntimeGetVersion")
        self.driver_version = self._version("cudaDriverGetVersion")
        if self.runtime_version // 1000 not in MAJORS:
            raise CudaUnavailable(
                f"libcudart is of CUDA {_dotted(self.runtime_version)}: kvtier knows"
                f" {' and '.join(map(str, sorted(MAJORS)))}"
            )
        if self.driver_version == 0:
            raise CudaUnavailable("there is no NVIDIA driver here: go on without a GPU")
        if self.driver_version < self.runtime_version // 1000 * 1000:
            raise CudaUnavailable(
                f"the driver is of CUDA {_dotted(self.driver_version)}, older than libcudart"
                f" {_dotted(self.runtime_version)}: upgrade the driver"
            )

    def driver_call(self, name: str, since: int = _PROC_SINCE) -> Any | None:
        """The driver's function in the form that it had in version `since`."""
        prototype = ctypes.CFUNCTYPE(c_int, *DRIVER_CALLS[name])
        address, status = c_void_p(), c_int(1)
        try:
            ask = self._runtime_call(
                "cudaGetDriverEntryPointByVersion",
                [c_char_p, _ADDRESS_OUT, c_uint, c_ulonglong, _INT_OUT],
            )
        except CudaUnavailable:  # CUDA 12.0 to 12.4 cannot be asked for a version.
            return self._driver_call_by_symbol(name, prototype, since)
        code = ask(name.encode(), byref(address), since, 0, byref(status))
        if code != 0:
            self.calls["cudaGetLastError"]()
        return prototype(address.value) if code == status.value == 0 and address.value else None

    def batch_call(self) -> tuple[Any, int] | None:
        """(function, its number of arguments), or None where there are no batches."""
        if self.driver_version < BATCH_SINCE:
            return None
        if (call := self.driver_call("cuMemcpyBatchAsync", BATCH_SINCE)) is not None:
            return call, 9
        if self.runtime_version < BATCH_SINCE:
            return None
        count = _RUNTIME_FORMS[self.runtime_version // 1000]
        types = [*_BATCH, *([POINTER(c_size_t)] if count == 9 else []), _STREAM]
        try:
            return self._runtime_call("cudaMemcpyBatchAsync", types), count
        except CudaUnavailable:
            return None

    def _driver_call_by_symbol(self, name: str, prototype: Any, since: int) -> Any | None:
        """Only what has never changed its form: a plain symbol may be of any version."""
        if since > _PROC_SINCE:
            return None
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            return prototype((name, driver))
        except (OSError, AttributeError):
            return None

    def _runtime_call(self, name: str, types: list[Any]) -> Any:
        try:
            call = getattr(self._library, name)
        except AttributeError:
            raise CudaUnavailable(f"{self._library._name} has no {name}: no libcudart?") from None
        call.argtypes, call.restype = types, c_int
        return call

    def _version(self, name: str) -> int:
        version = c_int()
        code = self.calls[name](byref(version))
        return version.value if code == 0 else 0


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
