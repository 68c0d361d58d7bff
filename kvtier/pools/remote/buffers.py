"""Buffers for values, used again and again: touching new memory costs more than a copy.

A buffer belongs to whoever took it until he gives it back; who cannot be sure that nobody reads or
writes it any more (a call that hangs) does not, and it is left to the garbage collector.
"""

from __future__ import annotations

import threading

import numpy as np

from kvtier.memory import Bytes

# Lengths of encoded values differ; of those in one step of 64 KiB each buffer fits all.
_STEP_BYTES = 64 << 10


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
        length = -(-count_bytes // _STEP_BYTES) * _STEP_BYTES
        with self._lock:
            free = self._free.get(length)
            if free:
                self._kept_bytes -= length
                return free.pop()[:count_bytes]
        return np.empty(length, np.uint8)[:count_bytes]

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
    if not isinstance(whole, np.ndarray) or not whole.flags.owndata:
        return None
    if whole.dtype != np.uint8 or whole.nbytes % _STEP_BYTES or not whole.nbytes:
        return None
    return whole
