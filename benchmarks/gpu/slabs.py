"""Host memory for the GPU check: memfds mapped as a worker maps the daemon's slabs."""

from __future__ import annotations

import mmap
import os
from enum import Enum

from kvtier.memory import Bytes, Mapping

_MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 14, 15


class Pages(Enum):
    SMALL = "4 KiB"
    HUGE = "transparent huge"  # Where the machine gives them to shared memory.
    RESERVED = "2 MiB reserved"


class Slab:
    """One memfd; every page is there before anybody measures anything."""

    def __init__(
        self, length_bytes: int, pages: Pages = Pages.SMALL, fd: int | None = None
    ) -> None:
        """`fd`: another one's memory, which is mapped a second time. Raises OSError where there
        are no such pages."""
        self.length_bytes = -(-length_bytes // (2 << 20)) * (2 << 20)
        flags = os.MFD_CLOEXEC | (os.MFD_HUGETLB if pages is Pages.RESERVED else 0)
        self.fd = os.memfd_create("kvtier-gpu-check", flags) if fd is None else os.dup(fd)
        try:
            if fd is None:
                os.ftruncate(self.fd, self.length_bytes)
            self._mapping = Mapping(self.fd, self.length_bytes)
        except OSError:
            os.close(self.fd)
            raise
        if pages is not Pages.RESERVED:
            self._advise(_MADV_HUGEPAGE if pages is Pages.HUGE else _MADV_NOHUGEPAGE)
        self.array[:: mmap.PAGESIZE] |= 0
        self.address = self._mapping.address

    @property
    def array(self) -> Bytes:
        return self._mapping.array

    def close(self) -> None:
        self._mapping.close()
        os.close(self.fd)

    def _advise(self, advice: int) -> None:
        try:
            self._mapping.advise(advice)
        except OSError:
            return  # A kernel without huge pages has only one answer.


def huge_bytes_of(address: int) -> int | None:
    """How much of the mapping at the address lies on huge pages; None where nobody says."""
    try:
        with open("/proc/self/smaps", encoding="ascii") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    inside = False
    for line in lines:
        first, dash, rest = line.partition("-")
        if dash and rest[:1].isalnum() and " " in rest and ":" not in first:
            inside = int(first, 16) <= address < int(rest.split(" ", 1)[0], 16)
        elif inside and line.startswith(("ShmemPmdMapped:", "FilePmdMapped:")):
            kib = int(line.split()[1])
            if kib:
                return kib << 10
    return 0
