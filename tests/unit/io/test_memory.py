"""Memfds: their length is fixed, their holes give memory back, their page kind is told truly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.io import memory as pages
from kvtier.memory import HUGE_BYTES, Mapping

LENGTH = 2 * HUGE_BYTES


@pytest.fixture
def fd() -> Iterator[int]:
    fd = pages.create_memfd("kvtier-test", LENGTH)
    yield fd
    os.close(fd)


def allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_a_peer_can_neither_shrink_nor_grow_a_sealed_file_nor_seal_it_further(fd: int) -> None:
    pages.seal_length(fd)
    for length in (0, LENGTH - 4096, LENGTH + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, length)
    with pytest.raises(PermissionError):
        pages.seal_length(fd)
    assert os.fstat(fd).st_size == LENGTH


def test_a_new_program_does_not_inherit_the_file(fd: int) -> None:
    assert not os.get_inheritable(fd)


def test_populating_makes_exactly_the_pages_asked_for(fd: int) -> None:
    mapping = Mapping(fd, LENGTH)
    pages.populate(mapping, HUGE_BYTES, 1 << 20)
    assert allocated_bytes(fd) == 1 << 20
    pages.populate(mapping, HUGE_BYTES, 1 << 20)
    assert allocated_bytes(fd) == 1 << 20


def test_populating_keeps_what_was_written(fd: int) -> None:
    mapping = Mapping(fd, LENGTH)
    mapping.array[5] = 5
    pages.populate(mapping, 0, LENGTH)
    assert mapping.array[5] == 5


def test_a_punched_sealed_file_has_no_memory_and_reads_as_zeros(fd: int) -> None:
    pages.seal_length(fd)
    mapping = Mapping(fd, LENGTH)
    mapping.array[:] = 1
    pages.punch_hole(fd, HUGE_BYTES, HUGE_BYTES)
    assert allocated_bytes(fd) == HUGE_BYTES
    assert mapping.array[:HUGE_BYTES].all()
    assert not mapping.array[HUGE_BYTES:].any()


def test_base_pages_are_not_called_huge(fd: int) -> None:
    mapping = Mapping(fd, LENGTH)
    mapping.array[:] = 1
    if "[always]" in (Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")).read_text():
        pytest.skip("every memfd has huge pages here")
    assert pages.huge_mapped_bytes(mapping) == 0


def test_collapsing_gives_huge_pages_and_keeps_the_bytes(fd: int) -> None:
    if not pages.collapse_may_work():
        pytest.skip("this machine has no huge pages of 2 MiB, or forbids them")
    mapping = Mapping(fd, LENGTH)
    mapping.array[7] = 7
    pages.populate(mapping, HUGE_BYTES, 4096)
    if not pages.collapse(mapping, 0, LENGTH):
        pytest.skip("the kernel refuses MADV_COLLAPSE (older than 6.1, or out of huge pages)")
    assert pages.huge_mapped_bytes(mapping) == LENGTH
    assert mapping.array[7] == 7
    assert not mapping.array[HUGE_BYTES:].any()


def test_collapsing_a_range_without_pages_fails_and_changes_nothing(fd: int) -> None:
    mapping = Mapping(fd, LENGTH)
    assert not pages.collapse(mapping, 0, LENGTH)
    assert allocated_bytes(fd) == 0


def test_advice_beyond_the_mapping_is_our_own_mistake(fd: int) -> None:
    mapping = Mapping(fd, HUGE_BYTES)
    with pytest.raises(AssertionError, match="outside"):
        pages.populate(mapping, HUGE_BYTES, 4096)


def test_asking_for_reserved_huge_pages_leaves_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pages.hugetlb_works()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("setting", "size", "advised", "collapsed"),
    [
        ("always within_size [advise] never deny force", HUGE_BYTES, True, True),
        ("[always] within_size advise never deny force", HUGE_BYTES, True, True),
        ("always within_size advise [never] deny force", HUGE_BYTES, False, True),
        ("always within_size advise never [deny] force", HUGE_BYTES, False, False),
        ("always within_size [advise] never deny force", 512 << 20, False, False),
    ],
)
def test_the_kernels_settings_say_which_way_may_work(
    tmp_path: Path, setting: str, size: int, advised: bool, collapsed: bool
) -> None:
    (tmp_path / "shmem_enabled").write_text(setting + "\n")
    (tmp_path / "hpage_pmd_size").write_text(f"{size}\n")
    assert pages.thp_advice_works(tmp_path) == advised
    assert pages.collapse_may_work(tmp_path) == collapsed


def test_a_kernel_without_huge_pages_is_base_pages(tmp_path: Path) -> None:
    assert not pages.thp_advice_works(tmp_path)
    assert not pages.collapse_may_work(tmp_path)
