"""Anonymous shared files (memfds) and their pages: create, seal, populate, collapse, punch.

Everything here that can take long releases the GIL: it is one system call through ctypes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from pathlib import Path

from kvtier.memory import HUGE_BYTES, Mapping

MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23  # Linux 5.14. Reports a lack of memory instead of raising SIGBUS.
MADV_COLLAPSE = 25  # Linux 6.1.

_FALLOC_KEEP_SIZE = 0x01
_FALLOC_PUNCH_HOLE = 0x02
_THP_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_COLLAPSE_TRIES_MAX = 2  # EAGAIN: a page was locked or on a per-CPU list just then.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.restype = ctypes.c_int
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def create_memfd(name: str, length_bytes: int, *, hugetlb: bool = False) -> int:
    """A new anonymous file of this length without pages; close-on-exec, not sealed yet."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if hugetlb:
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    fd = os.memfd_create(name, flags)
    try:
        os.ftruncate(fd, length_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def seal_length(fd: int) -> None:
    """Fix the file's length for ever: a peer that shrank it would end us with SIGBUS.

    Not F_SEAL_WRITE: engines write into the file through their mappings, and a sealed file could
    not be punched. F_SEAL_SEAL, so that no peer adds that seal and takes the file from all others.
    """
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def punch_hole(fd: int, first: int, length_bytes: int) -> None:
    """Give these pages back to the system, whoever has mapped them; they read as zeros after."""
    if _libc.fallocate(fd, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, first, length_bytes) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"punching {length_bytes} bytes: {os.strerror(number)}")


def populate(mapping: Mapping, first: int, length_bytes: int) -> None:
    """Make the pages exist, zero-filled, charged to our cgroup; pages that exist are left alone."""
    mapping.advise(MADV_POPULATE_WRITE, first, length_bytes)


def collapse(mapping: Mapping, first: int, length_bytes: int) -> bool:
    """Make huge pages of the range, which must have a page in every 2 MiB; False where it failed.

    Never after the range was registered with CUDA: pinned pages cannot be moved.
    """
    for _ in range(_COLLAPSE_TRIES_MAX):
        try:
            mapping.advise(MADV_COLLAPSE, first, length_bytes)
            return True
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return False  # No memory in one run, not supported, or refused: 4 KiB pages do.
    return False


def hugetlb_works() -> bool:
    """Whether a huge page of 2 MiB is reserved and free for us: creating the file proves nothing.

    Without one the mapping fails (ENOMEM), or its first touch does.
    """
    try:
        fd = create_memfd("kvtier-trial", HUGE_BYTES, hugetlb=True)
    except OSError:
        return False
    try:
        mapping = Mapping(fd, HUGE_BYTES)
        try:
            populate(mapping, 0, HUGE_BYTES)
            return True
        finally:
            mapping.close()
    except OSError:
        return False
    finally:
        os.close(fd)


def thp_advice_works(settings: Path = _THP_SETTINGS) -> bool:
    """Whether MADV_HUGEPAGE gives a memfd huge pages at its first touch."""
    return _huge_page_fits(settings) and _chosen(settings / "shmem_enabled") in {
        "always",
        "within_size",
        "advise",
        "force",
    }


def collapse_may_work(settings: Path = _THP_SETTINGS) -> bool:
    """Whether MADV_COLLAPSE is worth trying: it heeds no setting but `deny`."""
    return _huge_page_fits(settings) and _chosen(settings / "shmem_enabled") != "deny"


def huge_mapped_bytes(mapping: Mapping) -> int:
    """How much of the mapping is on huge pages, as the kernel tells (smaps), not as we hope."""
    start = f"{mapping.address:x}-"
    inside = False
    huge_kib = 0
    with Path("/proc/self/smaps").open("rb", buffering=1 << 16) as lines:
        for line in lines:
            if inside:
                name, _, value = line.partition(b":")
                if name in _HUGE_FIELDS:
                    huge_kib += int(value.split()[0])
                elif name == b"VmFlags":
                    break
            elif line.startswith(start.encode()):
                inside = True
    return huge_kib << 10


_HUGE_FIELDS = {b"ShmemPmdMapped", b"Shared_Hugetlb", b"Private_Hugetlb"}


def _huge_page_fits(settings: Path) -> bool:
    """With 64 KiB base pages the huge page has 512 MiB: of no use for slabs."""
    try:
        return int((settings / "hpage_pmd_size").read_text()) == HUGE_BYTES
    except (OSError, ValueError):
        return False


def _chosen(setting: Path) -> str:
    """The word in brackets of a sysfs choice."""
    try:
        return setting.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""
