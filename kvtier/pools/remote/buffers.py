"""Buffers for values, used again and again: touching new memory costs more than a copy.

A buffer belongs to whoever took it until he gives it back; who cannot be sure that nobody reads or
writes it any more (a call that hangs) does not, and it is left to the garbage collector.

Large ones lie on huge pages: there the kernel received 64 MiB in 20 ms, else in 26 to 29. Small
ones come from rooms of their own, and go back there with their last reference. In the allocator's
heap a burst of them would leave holes between what lives long, and in the hour of the soak test
the daemon's memory grew by a fifth that way.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from contextlib import suppress

import numpy as np

from kvtier.memory import HUGE_BYTES, Bytes

# Lengths of encoded values differ; of those in one step each buffer fits all.
_STEP_BYTES = 64 << 10
_SMALL_STEP_BYTES = 16 << 10
_SMALL_BYTES_MAX = 128 << 10
_ROOM_BYTES = 1 << 20


class Buffers:
    """Any thread may take and give back."""

    def __init__(self, kept_bytes_max: int = 256 << 20) -> None:
        """`kept_bytes_max`: more than two batches on their way each way are not waiting here."""
        self._kept_bytes_max = kept_bytes_max
        self._lock = threading.Lock()  # Guards the rest.
        self._free: dict[int, list[Bytes]] = {}  # Large ones, by length.
        self._kept_bytes = 0
        self._rooms: dict[int, list[_Room]] = {}  # By the length of their buffers.

    @property
    def kept_bytes(self) -> int:
        """Of large ones."""
        return self._kept_bytes

    @property
    def room_bytes(self) -> int:
        """Of small ones, those in use included."""
        with self._lock:
            return _ROOM_BYTES * sum(map(len, self._rooms.values()))

    def take(self, count_bytes: int) -> Bytes:
        """A view of that length, its contents anything."""
        if count_bytes <= _SMALL_BYTES_MAX:
            return self._take_small(count_bytes)
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
        if whole is None or whole.nbytes <= _SMALL_BYTES_MAX:
            return
        length = whole.nbytes
        with self._lock:
            if self._kept_bytes + length <= self._kept_bytes_max:
                self._kept_bytes += length
                self._free.setdefault(length, []).append(whole)

    def forget(self) -> None:
        """Keep none: what stood in them goes back to the system with their memory."""
        with self._lock:
            self._free.clear()
            self._kept_bytes = 0
            self._rooms.clear()

    def _take_small(self, count_bytes: int) -> Bytes:
        """From the first room that has one, so that the last ones empty; one empty room is kept."""
        length = max(1, -(-count_bytes // _SMALL_STEP_BYTES)) * _SMALL_STEP_BYTES
        with self._lock:
            rooms = self._rooms.setdefault(length, [])
            for room in [one for one in rooms if one.is_empty][1:]:
                rooms.remove(room)
            place = next((found for one in rooms if (found := one.take()) is not None), None)
            if place is None:
                rooms.append(room := _Room(length))
                place = room.take()
        assert place is not None, "a room without a place"
        return place[:count_bytes]


class _Room:
    """Memory for some buffers of one length; unmapped when neither it nor one of them is left."""

    def __init__(self, length: int) -> None:
        self._memory = mmap.mmap(-1, _ROOM_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._length = length
        # No lock: a buffer may end wherever memory is collected.
        self._free = deque(range(0, _ROOM_BYTES - length + 1, length))
        self._count = len(self._free)
        self._lent: dict[int, weakref.ref[Bytes]] = {}

    @property
    def is_empty(self) -> bool:
        return len(self._free) == self._count

    def take(self) -> Bytes | None:
        if not self._free:
            return None
        first = self._free.popleft()
        whole = np.frombuffer(self._memory, np.uint8, self._length, first)
        free = self._free
        self._lent[first] = weakref.ref(whole, lambda _: free.append(first))
        return whole


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
