"""Page-aligned host memory for CUDA tests: a memfd mapped as a worker maps a slab."""

from __future__ import annotations

import mmap
import os

from kvtier.memory import Bytes, Mapping


class HostSlab:
    """Holds its mapping; `array` is all of it."""

    def __init__(self, length_bytes: int) -> None:
        self.length_bytes = -(-length_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("kvtier-test", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, self.length_bytes)
            self._mapping = Mapping(fd, self.length_bytes)
        finally:
            os.close(fd)
        self.address = self._mapping.address

    @property
    def array(self) -> Bytes:
        return self._mapping.array
