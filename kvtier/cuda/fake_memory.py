"""Memory as a fake GPU sees it: device allocations, and host memory that is registered or not.

Device addresses lie above all addresses of the host, with gaps between allocations, so that an
address that is used for the wrong side, or runs over its end, is seen as what it is. Registered
host memory may have another address on the device (as under WSL2 and ROCm), where using the host's
own address is a fault.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right, insort
from dataclasses import dataclass

import numpy as np

from kvtier.cuda.errors import CudaCode
from kvtier.cuda.runtime import Addresses
from kvtier.memory import Bytes

DEVICE_FIRST = 1 << 58
ALIAS_DISTANCE = 1 << 57
_GAP_BYTES = 2 << 20


class Fault(Exception):
    """What an operation ends with on the device, or what a call answers."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class RegistrationLimits:
    """Where registrations were seen to fail, however much memory was free."""

    one_bytes_max: int = (512 << 30) - 1
    total_bytes_max: int = 1 << 50
    count_max: int = 1 << 20


class HostMemory:
    """What is registered; invariant: registrations never overlap."""

    def __init__(self, limits: RegistrationLimits, *, is_aliased: bool) -> None:
        self._limits = limits
        self._alias = ALIAS_DISTANCE if is_aliased else 0
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    @property
    def registered_bytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def registrations(self) -> dict[int, int]:
        """Length by address."""
        return dict(self._sizes)

    def register(self, address: int, length_bytes: int) -> None:
        """Raises Fault and changes nothing."""
        limits = self._limits
        if length_bytes <= 0:
            raise Fault(CudaCode.INVALID_VALUE, "nothing to register")
        if self._registration_at(address, length_bytes) is not None:
            raise Fault(CudaCode.ALREADY_REGISTERED, f"{address:#x} is registered already")
        if (
            length_bytes > limits.one_bytes_max
            or self.registered_bytes + length_bytes > limits.total_bytes_max
            or len(self._starts) >= limits.count_max
        ):
            raise Fault(CudaCode.OUT_OF_MEMORY, f"cannot pin {length_bytes} bytes")
        insort(self._starts, address)
        self._sizes[address] = length_bytes

    def unregister(self, address: int) -> int:
        """The length of what was registered at exactly this address. Raises Fault."""
        if address not in self._sizes:
            raise Fault(CudaCode.NOT_REGISTERED, f"nothing was registered at {address:#x}")
        self._starts.remove(address)
        return self._sizes.pop(address)

    def device_address(self, address: int) -> int:
        if self._registration_at(address, 1) is None:
            raise Fault(CudaCode.INVALID_VALUE, f"{address:#x} is not registered")
        return address + self._alias

    def is_registered(self, address: int, length_bytes: int) -> bool:
        """Raises Fault for a range that is so in part, or lies in two registrations."""
        start = self._registration_at(address, length_bytes)
        if start is None:
            return False
        if not start <= address <= address + length_bytes <= start + self._sizes[start]:
            raise Fault(CudaCode.INVALID_VALUE, f"{address:#x} lies in two kinds of memory")
        return True

    def host_address(self, device_address: int, length_bytes: int) -> int | None:
        """What a kernel or a batch reaches by this address; None if it is no host memory's."""
        address = device_address - self._alias
        try:
            return address if self.is_registered(address, length_bytes) else None
        except Fault:
            return None

    def _registration_at(self, address: int, length_bytes: int) -> int | None:
        """The last registration that the range overlaps."""
        index = bisect_right(self._starts, address + length_bytes - 1) - 1
        if index < 0:
            return None
        start = self._starts[index]
        return start if start + self._sizes[start] > address else None


class DeviceMemory:
    """Allocations on the device, each a NumPy array."""

    def __init__(self, total_bytes: int) -> None:
        self._free_bytes = total_bytes
        self._next = DEVICE_FIRST
        self._arrays: dict[int, Bytes] = {}
        self._starts: list[int] = []

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    @property
    def allocation_count(self) -> int:
        return len(self._arrays)

    def allocate(self, length_bytes: int) -> int:
        if not 0 < length_bytes <= self._free_bytes:
            raise Fault(CudaCode.OUT_OF_MEMORY, f"{length_bytes} bytes of {self._free_bytes}")
        address = self._next
        self._arrays[address] = np.zeros(length_bytes, np.uint8)
        self._arrays[address][: 1 << 20] = 0xDB  # New memory is not zero; all of it would cost.
        self._starts.append(address)
        self._free_bytes -= length_bytes
        self._next += -(-length_bytes // _GAP_BYTES) * _GAP_BYTES + _GAP_BYTES
        return address

    def free(self, address: int) -> None:
        if address not in self._arrays:
            raise Fault(CudaCode.INVALID_VALUE, f"nothing was allocated at {address:#x}")
        self._free_bytes += len(self._arrays.pop(address))
        self._starts.remove(address)

    def view(self, address: int, length_bytes: int) -> Bytes:
        """Raises Fault for what is not allocated."""
        index = bisect_right(self._starts, address) - 1
        if index >= 0:
            array = self._arrays[self._starts[index]]
            first = address - self._starts[index]
            if first + length_bytes <= len(array):
                return array[first : first + length_bytes]
        raise Fault(CudaCode.ILLEGAL_ADDRESS, f"{length_bytes} bytes at {address:#x} of the device")


class FakeMemory:
    """Both sides, by the rules of who may use which address."""

    def __init__(self, host: HostMemory, device: DeviceMemory) -> None:
        self.host = host
        self.device = device

    def on_device(self, address: int, length_bytes: int) -> Bytes:
        """What a kernel or a batch reaches. Raises Fault as the device would."""
        if address >= DEVICE_FIRST:
            return self.device.view(address, length_bytes)
        host_address = self.host.host_address(address, length_bytes)
        if host_address is None:
            raise Fault(
                CudaCode.ILLEGAL_ADDRESS,
                f"{address:#x} is not what the device calls this host memory",
            )
        return host_view(host_address, length_bytes)

    def canonical(self, addresses: Addresses) -> Addresses:
        """The device's addresses of host memory as the host's."""
        first, last = np.uint64(ALIAS_DISTANCE), np.uint64(DEVICE_FIRST)
        is_alias = (addresses >= first) & (addresses < last)
        return np.where(is_alias, addresses - first, addresses)


def host_view(address: int, length_bytes: int) -> Bytes:
    """Memory of this process; what is not mapped is a mistake of the test, told without a crash."""
    assert _is_mapped(address, length_bytes), f"{address:#x} is no address of this process"
    return np.ctypeslib.as_array((ctypes.c_uint8 * length_bytes).from_address(address))


def _is_mapped(address: int, length_bytes: int) -> bool:
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    span_bytes = address + length_bytes - page
    residency = ctypes.create_string_buffer(span_bytes // mmap.PAGESIZE + 1)
    return bool(_libc.mincore(page, span_bytes, residency) == 0)


_libc = ctypes.CDLL(None)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
