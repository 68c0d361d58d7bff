"""Mappings: aligned, shared, alive as long as somebody looks at them, and not inherited."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier import memory
from kvtier.memory import HUGE_BYTES, Mapping

LENGTH = 1 << 20


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("kvtier-test")
    os.ftruncate(fd, LENGTH)
    yield fd
    os.close(fd)


def is_mapped(address: int) -> bool:
    return f"{address:x}-" in Path("/proc/self/maps").read_text()


def test_every_mapping_starts_at_a_huge_page(fd: int) -> None:
    mappings = [Mapping(fd, LENGTH) for _ in range(4)]
    assert [mapping.address % HUGE_BYTES for mapping in mappings] == [0] * 4
    assert all(mapping.array.ctypes.data == mapping.address for mapping in mappings)


def test_the_address_space_beside_a_mapping_is_given_back(fd: int) -> None:
    before = Path("/proc/self/statm").read_text().split()[0]
    mapping = Mapping(fd, LENGTH)
    grown = int(Path("/proc/self/statm").read_text().split()[0]) - int(before)
    assert grown * os.sysconf("SC_PAGE_SIZE") < LENGTH + HUGE_BYTES
    mapping.close()


def test_two_mappings_of_one_file_share_their_bytes(fd: int) -> None:
    one, other = Mapping(fd, LENGTH), Mapping(fd, LENGTH)
    one.array[123_456] = 7
    assert other.array[123_456] == 7


def test_closing_unmaps_at_once_when_nobody_looks(fd: int) -> None:
    mapping = Mapping(fd, LENGTH)
    assert is_mapped(mapping.address)
    assert mapping.close()
    assert not is_mapped(mapping.address)


def test_a_view_of_a_view_keeps_the_pages_after_close(fd: int) -> None:
    mapping = Mapping(fd, LENGTH)
    view = mapping.array[100:200].view(np.uint16)[5:]
    view[:] = 9
    assert not mapping.close()
    assert is_mapped(mapping.address)
    assert (view == 9).all()
    del view
    gc.collect()
    assert not is_mapped(mapping.address)
    assert mapping.close(), "asking again tells that it is unmapped now"


def test_a_closed_mapping_gives_no_views(fd: int) -> None:
    mapping = Mapping(fd, LENGTH)
    mapping.close()
    with pytest.raises(AssertionError, match="closed"):
        _ = mapping.array


def test_a_forked_child_has_no_mapping_and_unmaps_nothing_of_its_own(fd: int) -> None:
    mapping = Mapping(fd, LENGTH)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            inherited = is_mapped(mapping.address)
            # The child has something else at that address by now: closing must not touch it.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | memory._MAP_FIXED
            memory._mmap(mapping.address, LENGTH, mmap.PROT_READ, flags, -1)
            mapping.close()
            code = 0 if is_mapped(mapping.address) and not inherited else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_mapped(mapping.address)


def test_a_failed_mapping_names_the_reason_and_leaves_nothing() -> None:
    before = Path("/proc/self/maps").read_text().count("\n")
    with pytest.raises(OSError, match="mmap of 1048576 bytes") as raised:
        Mapping(-5, LENGTH)
    assert raised.value.errno == errno.EBADF
    assert Path("/proc/self/maps").read_text().count("\n") <= before + 1
    with pytest.raises(ValueError, match="multiple of the page size"):
        Mapping(-5, LENGTH + 1)


@pytest.mark.parametrize("offset", [HUGE_BYTES, HUGE_BYTES + 4096 * 16])
def test_a_part_of_a_file_is_mapped_where_it_lies(fd: int, offset: int) -> None:
    os.ftruncate(fd, offset + LENGTH)
    whole, part = Mapping(fd, offset + LENGTH), Mapping(fd, LENGTH, offset)
    whole.array[offset] = 7
    part.array[-1] = 8
    assert (part.array[0], whole.array[-1]) == (7, 8)
    assert part.address % HUGE_BYTES == 0
