"""What a client looks at before it maps a segment of the CXL tier."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from kvtier.errors import BadFrame
from kvtier.v1 import kvtier_pb2 as pb

SYSFS = Path("/sys")


def file_length(fd: int, sysfs: Path = SYSFS) -> int:
    """How much of the file can be mapped. A device's own length is 0: sysfs knows it, and raises
    OSError where it is not to be seen."""
    status = os.fstat(fd)
    if not stat.S_ISCHR(status.st_mode):
        return status.st_size
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    text = (sysfs / "dev/char" / number / "size").read_text()
    return int(text)


def check_segment(offer: pb.SegmentOffered, file_bytes: int) -> None:
    """What lies beyond the file would end this process with SIGBUS, not with an exception."""
    if offer.offset + offer.length > file_bytes:
        raise BadFrame(
            f"segment {offer.segment} ends at {offer.offset + offer.length}, "
            f"its file at {file_bytes}"
        )
    if offer.length == 0 or offer.length % mmap.PAGESIZE or offer.offset % mmap.PAGESIZE:
        raise BadFrame(f"segment {offer.segment} has {offer.length} bytes at {offer.offset}")
    if offer.row_count_max == 0:
        raise BadFrame(f"segment {offer.segment} has no slots")
