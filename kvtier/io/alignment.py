"""Direct I/O: whether a file or device allows it, and what it asks of offsets and addresses.

The kernel is asked (statx since 6.1, the device's sector size before); a file system that tells
nothing is tried out. Nobody is believed untried: the answer is the smallest alignment with which a
read really works.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier.memory import Bytes

ALIGNMENTS = (512, 1024, 2048, 4096)

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MASK_AT, _MEMORY_ALIGN_AT, _OFFSET_ALIGN_AT = 0, 152, 156
_BLKSSZGET = 0x1268

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class DirectIo:
    """What was found. `alignment` is 1 where reads and writes go through the page cache."""

    is_direct: bool
    alignment: int
    reason: str  # Why it is not direct; for the log.


def open_direct(path: Path, flags: int) -> tuple[int, DirectIo]:
    """Open for direct I/O where that works, buffered where it does not; OSError from the open."""
    buffered_fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        fd = os.open(path, (flags & ~os.O_CREAT) | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        return buffered_fd, DirectIo(False, 1, f"O_DIRECT was refused: {error.strerror}")
    told = told_alignment(fd)
    if told == 0:
        os.close(fd)
        return buffered_fd, DirectIo(False, 1, "the file system allows no direct I/O here")
    for alignment in ALIGNMENTS:
        if (told is None or alignment >= told) and _read_works(fd, alignment):
            os.close(buffered_fd)
            return fd, DirectIo(True, alignment, "")
    os.close(fd)
    asked = f" (it asks for {told})" if told else ""
    reason = f"no direct read worked with an alignment up to {ALIGNMENTS[-1]} bytes{asked}"
    return buffered_fd, DirectIo(False, 1, reason)


def told_alignment(fd: int) -> int | None:
    """What the kernel says: bytes, 0 for "no direct I/O", None when it does not know."""
    answer = _statx_alignment(fd)
    if answer is None and stat.S_ISBLK(os.fstat(fd).st_mode):
        return sector_bytes(fd)
    return answer


def sector_bytes(fd: int) -> int | None:
    """The logical sector size of a block device."""
    try:
        answer = fcntl.ioctl(fd, _BLKSSZGET, bytes(4))
    except OSError:
        return None
    size: int = struct.unpack("=i", answer)[0]
    return size


def parse_statx(raw: bytes) -> int | None:
    """The alignment in a `struct statx`; None when the kernel did not fill it in."""
    (mask,) = struct.unpack_from("=I", raw, _MASK_AT)
    if not mask & _STATX_DIOALIGN:
        return None
    (memory,) = struct.unpack_from("=I", raw, _MEMORY_ALIGN_AT)
    (offset,) = struct.unpack_from("=I", raw, _OFFSET_ALIGN_AT)
    return max(memory, offset) if memory and offset else 0


def _statx_alignment(fd: int) -> int | None:
    if not hasattr(_libc, "statx"):
        return None
    raw = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, raw) != 0:
        return None
    return parse_statx(raw.raw)


def _read_works(fd: int, alignment: int) -> bool:
    """A read at an offset and an address that are aligned this much and no more."""
    size = max(os.fstat(fd).st_size, os.lseek(fd, 0, os.SEEK_END))
    page = aligned_buffer(4 * ALIGNMENTS[-1])
    try:
        read = os.preadv(fd, [page[alignment : 2 * alignment]], alignment)
    except OSError:
        return False
    return read == alignment or size < 2 * alignment


def aligned_buffer(length_bytes: int) -> Bytes:
    """Zeros at an address that every direct access accepts; for small reads and writes of ours."""
    return np.frombuffer(mmap.mmap(-1, max(1, length_bytes)), np.uint8)[:length_bytes]
