"""Shared memory as this process sees it: 2 MiB-aligned mappings of files; used by both sides.

A `Mapping` owns an address range. NumPy views of it hold the range: the pages are unmapped when the
mapping is closed *and* the last view is gone, so that a view can never point into nothing (which
would end the process with SIGSEGV, not with an exception). `close` says whether that is now.

Mappings are MADV_DONTFORK: a forked child must neither write into our pool nor keep it alive.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

HUGE_BYTES = 2 << 20
"""Alignment of every mapping. Without it a huge page of the file is mapped in 4 KiB pieces, which
costs 2 to 3 times in copies and 20 times in first touches."""

MADV_DONTFORK = 10

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)  # CDLL, not PyDLL: calls release the GIL.
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping:
    """A file, or a part of one, mapped shared at a 2 MiB-aligned address; writable if not told."""

    def __init__(
        self, fd: int, length_bytes: int, offset: int = 0, *, writable: bool = True
    ) -> None:
        """Map `length_bytes` of `fd` from `offset` on; the fd may be closed afterwards."""
        self.length_bytes = length_bytes
        self.address = _map_aligned(fd, length_bytes, offset, writable=writable)
        self._range: _Range | None = _Range(self.address, length_bytes, writable=writable)
        self._held = weakref.ref(self._range)
        try:
            self.advise(MADV_DONTFORK)
        except OSError:
            self.close()
            raise

    @property
    def array(self) -> Bytes:
        """All bytes without a copy, to be written to if the mapping may be. The view keeps the
        pages mapped while it lives."""
        assert self._range is not None, "the mapping is closed"
        return np.asarray(self._range)

    @property
    def is_closed(self) -> bool:
        return self._range is None

    def advise(self, advice: int, first: int = 0, length_bytes: int | None = None) -> None:
        """madvise(2) on a part of the mapping, without the GIL."""
        assert self._range is not None, "the mapping is closed"
        length = self.length_bytes - first if length_bytes is None else length_bytes
        assert 0 <= first <= self.length_bytes - length, "outside the mapping"
        if _libc.madvise(self.address + first, length, advice) != 0:
            raise _os_error(f"madvise({advice}) of {length} bytes")

    def close(self) -> bool:
        """Give the pages up; True when they are unmapped now, False when a view still holds them.

        Closing twice is allowed, and asks again.
        """
        self._range = None
        return self._held() is None


class _Range:
    """The address range, alive as long as somebody holds it: the mapping or a view."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, length_bytes: int, *, writable: bool) -> None:
        self.__array_interface__: dict[str, Any] = {
            "shape": (length_bytes,),
            "typestr": "|u1",
            "data": (address, not writable),
            "version": 3,
        }
        finalizer = weakref.finalize(self, _unmap, address, length_bytes, os.getpid())
        # At exit the kernel unmaps; doing it earlier would pull pages from under running threads.
        finalizer.atexit = False


def _map_aligned(fd: int, length_bytes: int, offset: int, *, writable: bool) -> int:
    """Map the file where the kernel likes, or else into a reservation of address space.

    The reservation keeps other threads out of the range until the file is there. Mapping without
    one first shows whether the file can be mapped, and of huge pages it is aligned at once.
    """
    if length_bytes <= 0 or length_bytes % mmap.PAGESIZE:
        raise ValueError(f"a mapping of {length_bytes} bytes: must be a multiple of the page size")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    found = _mmap(None, length_bytes, protection, mmap.MAP_SHARED, fd, offset)
    if found % HUGE_BYTES == 0:
        return found
    _libc.munmap(found, length_bytes)
    reserved_bytes = length_bytes + HUGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = _mmap(None, reserved_bytes, _PROT_NONE, flags, -1)
    address = -(-reserved // HUGE_BYTES) * HUGE_BYTES
    end, reserved_end = address + length_bytes, reserved + reserved_bytes
    try:
        _mmap(address, length_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
    finally:
        # Never the middle: a MAP_FIXED that failed may have removed the reservation there, and
        # then the range may be another thread's stack by now.
        if address > reserved:
            _libc.munmap(reserved, address - reserved)
        if end < reserved_end:
            _libc.munmap(end, reserved_end - end)
    return address


def _mmap(
    address: int | None,
    length_bytes: int,
    protection: int,
    flags: int,
    fd: int,
    offset: int = 0,
) -> int:
    mapped: int | None = _libc.mmap(address, length_bytes, protection, flags, fd, offset)
    if mapped is None or mapped == _MAP_FAILED:
        raise _os_error(f"mmap of {length_bytes} bytes of fd {fd}")
    return mapped


def _unmap(address: int, length_bytes: int, owner_pid: int) -> None:
    # A forked child has inherited this object but not the mapping: its range may be another's.
    if os.getpid() == owner_pid:
        _libc.munmap(address, length_bytes)


def _os_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
