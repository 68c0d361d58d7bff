"""The C library's heap, set up for messages of some hundred KiB that come and go.

As it comes, glibc gives every block above 128 KiB its own mapping, or returns the heap's top to the
system after each call: a match of 8192 hashes (256 KiB, copied three or four times on its way
through gRPC) then pays some hundred page faults. Measured: 0.3 of 0.85 ms of processor time a call.

And it gives up to eight heaps a core to threads that meet, each of which keeps what its largest
moment took: under a mixed load of four minutes 14 of 34 MiB lay free in 16 heaps, more with every
hour. Our threads hardly meet, for they hold Python's lock while they allocate.
"""

from __future__ import annotations

import ctypes

# From malloc.h.
_M_TRIM = -1
_M_MMAP = -3
_M_HEAPS = -8

# What is larger has a mapping of its own: few calls are, and the holes that they leave stay.
MMAP_BYTES = (1 << 20) + (64 << 10)
HEAPS = 2
TRIM_BYTES = 64 << 20  # Free memory at the heap's top that may stay ours.


def keep_message_memory() -> None:
    """Does nothing where the C library has no mallopt (musl)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP, MMAP_BYTES)
        mallopt(_M_TRIM, TRIM_BYTES)
        mallopt(_M_HEAPS, HEAPS)
