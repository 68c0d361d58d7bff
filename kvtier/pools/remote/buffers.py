"""Buffers for values, used again and again: touching new memory costs more than a copy.

A buffer belongs to whoever took it until he gives it back; who cannot be sure that nobody reads or
writes it any more (a call that hangs) does not, and it is left to the garbage collector.

Large ones lie on huge pages: there the kernel received 64 MiB in 20 ms, else in 26 to 29. Small
ones are not kept: the allocator's heap is as fast, and what a burst of small blocks took would be
kept for ever.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import numpy as np

from kvtier.memory import HUGE_BYTES, Bytes

# Lengths of encoded values differ; of those in one step of 64 KiB each buffer fits all.
_STEP_BYTES = 64 << 10
_KEPT_BYTES_MIN = 128 << 10


class Buffers:
    """Any thread may take and give back."""

    def __init__(self, kept_bytes_max: int = 256 << 20) -> None:
        """`kept_bytes_max`: more than two batches on their way each way are not waiting here."""
        self._kept_bytes_max = kept_bytes_max
        self._lock = threading.Lock()  # Guards the rest.
        self._free: dict[int, list[Bytes]] = {}  # By length.
        self._kept_bytes = 0

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    def take(self, count_bytes: int) -> Bytes:
        """A view of that length, its contents anything."""
        if count_bytes < _KEPT_BYTES_MIN:
            return np.empty(count_bytes, np.uint8)
        length = -(-count_bytes // _STEP_BYTES) * _STEP_BYTES
        with self._lock:
            free = self._free.get(length)
            if free:
                self._kept_bytes -= length
                return free.pop()[:count_bytes]
        return _new_buffer(length)[:count_bytes]

    def give_back(self, view: Bytes) -> None:
        """Nothing happens to a view that was not taken here, or when enough is kept."""
        whole = whole_of(view)
        if whole is None:
            return
        length = whole.nbytes
        with self._lock:
            if self._kept_bytes + length <= self._kept_bytes_max:
                self._kept_bytes += length
                self._free.setdefault(length, []).append(whole)


def whole_of(view: Bytes) -> Bytes | None:
    """The buffer that a view of `take` is of; None for other memory."""
    whole = view.base
    if not isinstance(whole, np.ndarray):
        return None
    held: object = whole.base
    is_mapped = isinstance(held, memoryview) and isinstance(held.obj, mmap.mmap)
    if not whole.flags.owndata and not is_mapped:
        return None
    if whole.dtype != np.uint8 or whole.nbytes % _STEP_BYTES or not whole.nbytes:
        return None
    return whole


def _new_buffer(length: int) -> Bytes:
    if length < HUGE_BYTES:
        return np.empty(length, np.uint8)
    room = mmap.mmap(-1, length + HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = -np.frombuffer(room, np.uint8).ctypes.data % HUGE_BYTES
    with suppress(OSError):  # A kernel without them.
        room.madvise(mmap.MADV_HUGEPAGE, first, length // HUGE_BYTES * HUGE_BYTES)
    return np.frombuffer(room, np.uint8, length, first)  # Unmapped with its last view.
