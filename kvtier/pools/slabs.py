"""Slabs: memfds whose pages exist before anybody is offered a slot in them.

A slab is created, populated on the best pages this machine gives (hugetlb, THP, collapsed, base),
sealed, and mapped by us as long as it lives. Whoever touches a page first has it charged to its
control group, so the daemon populates all of them; and a first touch costs as much as the copy
that it would otherwise slow down.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvtier.clock import Clock
from kvtier.io import memory as pages
from kvtier.io import numa
from kvtier.memory import HUGE_BYTES, Mapping
from kvtier.types import SlabId

SLAB_BYTES_MAX = 1 << 30  # The unit of registration with CUDA; larger ones hold its lock too long.
# Populating holds the process's mmap lock for reading, so that an mmap of another thread waits for
# a whole step. 8 MiB keep that below 10 ms and cost no speed (measured against 2 and 32 MiB).
POPULATE_STEP_BYTES = 8 << 20
_TOUCH_BYTES = 4096  # Rounded up to a page by the kernel.


class PageKind(StrEnum):
    """What pages a slab lies on, best first."""

    HUGETLB = "hugetlb"
    THP = "thp"
    COLLAPSED = "collapsed"
    MIXED = "mixed"  # Huge pages ran out on the way.
    BASE = "base"  # 4 KiB, or whatever this machine's page size is.
    DEVICE = "device"  # Whatever a dax device maps: not of the system's memory.


class PopulateCancelled(Exception):
    """Populating was given up on request; the memory is back."""


@dataclass(frozen=True, slots=True)
class Slab:
    """One populated slab. `mapping` is the daemon's own; peers get `fd` and map it themselves."""

    id: SlabId
    fd: int
    mapping: Mapping
    page_kind: PageKind
    huge_bytes: int
    populate_seconds: float
    node: int | None = None  # Where all its pages were when it was populated; None: anywhere.

    @property
    def length_bytes(self) -> int:
        return self.mapping.length_bytes


def best_page_kind() -> PageKind:
    """The best kind that this machine offers now."""
    if pages.hugetlb_works():
        return PageKind.HUGETLB
    return _best_kind_without_reserve()


def populate_slab(
    slab_id: SlabId,
    slab_bytes: int,
    wanted: PageKind,
    *,
    clock: Clock,
    is_cancelled: Callable[[], bool] = lambda: False,
    node: int | None = None,
) -> Slab:
    """Create a slab with all its pages; takes up to seconds a GiB, nearly all without the GIL.

    With a `node` all pages come from that NUMA node, and each is looked at. Raises OSError when the
    system, or the node, has no memory (WrongNode: pages lie elsewhere all the same) and
    PopulateCancelled when `is_cancelled` says so between two steps; either way nothing is left
    behind. Huge pages that run out are no error: the slab gets the next best ones, and `page_kind`
    says which.
    """
    assert 0 < slab_bytes <= SLAB_BYTES_MAX, f"a slab of {slab_bytes} bytes"
    assert slab_bytes % HUGE_BYTES == 0, f"a slab of {slab_bytes} bytes is no multiple of 2 MiB"
    started = clock.now()
    try:
        fd, mapping = _create_populated(slab_id, slab_bytes, wanted, node, is_cancelled)
    except OSError:
        if wanted is not PageKind.HUGETLB:
            raise
        # The reserve of huge pages is used up; ordinary memory may not be.
        wanted = _best_kind_without_reserve()
        fd, mapping = _create_populated(slab_id, slab_bytes, wanted, node, is_cancelled)
    huge_bytes = slab_bytes if wanted is PageKind.HUGETLB else pages.huge_mapped_bytes(mapping)
    kind = _kind_found(wanted, huge_bytes, slab_bytes)
    return Slab(slab_id, fd, mapping, kind, huge_bytes, clock.now() - started, node)


def adopt_slab(
    slab_id: SlabId, fd: int, page_kind: PageKind, huge_bytes: int, node: int | None
) -> Slab:
    """A slab that a former life has populated; the fd is the slab's then. Raises OSError."""
    mapping = Mapping(fd, os.fstat(fd).st_size)
    return Slab(slab_id, fd, mapping, page_kind, huge_bytes, 0.0, node)


def punch_slab(slab: Slab) -> bool:
    """Give the slab's memory back, even if a peer still maps it, and forget the slab.

    True when our own mapping is gone too; False while some view of it lives (it reads zeros then).
    """
    pages.punch_hole(slab.fd, 0, slab.length_bytes)
    os.close(slab.fd)
    return slab.mapping.close()


def _best_kind_without_reserve() -> PageKind:
    if pages.thp_advice_works():
        return PageKind.THP
    return PageKind.COLLAPSED if pages.collapse_may_work() else PageKind.BASE


def _kind_found(wanted: PageKind, huge_bytes: int, slab_bytes: int) -> PageKind:
    if huge_bytes == 0:
        return PageKind.BASE
    if huge_bytes < slab_bytes:
        return PageKind.MIXED
    # A mount-wide or kernel-wide setting may give huge pages that we did not ask for.
    return PageKind.THP if wanted is PageKind.BASE else wanted


def _create_populated(
    slab_id: SlabId,
    slab_bytes: int,
    kind: PageKind,
    node: int | None,
    is_cancelled: Callable[[], bool],
) -> tuple[int, Mapping]:
    hugetlb = kind is PageKind.HUGETLB
    fd = pages.create_memfd(f"kvtier-slab-{slab_id}", slab_bytes, hugetlb=hugetlb)
    try:
        pages.seal_length(fd)
        mapping = Mapping(fd, slab_bytes)
        try:
            if node is not None:
                numa.bind_to_node(mapping, node)
            _populate_steps(mapping, kind, node, is_cancelled)
            if node is not None:
                numa.verify_on_node(mapping, node)
        except BaseException:
            mapping.close()
            raise
    except BaseException:
        os.close(fd)
        raise
    return fd, mapping


def _populate_steps(
    mapping: Mapping, kind: PageKind, node: int | None, is_cancelled: Callable[[], bool]
) -> None:
    if kind is PageKind.THP:
        mapping.advise(pages.MADV_HUGEPAGE)
    for first in range(0, mapping.length_bytes, POPULATE_STEP_BYTES):
        if is_cancelled():
            raise PopulateCancelled
        length = min(POPULATE_STEP_BYTES, mapping.length_bytes - first)
        if kind is PageKind.COLLAPSED:
            for touched in range(first, first + length, HUGE_BYTES):
                pages.populate(mapping, touched, _TOUCH_BYTES)
            # What could not be collapsed is filled with base pages by the next line.
            pages.collapse(mapping, first, length)
        pages.populate(mapping, first, length)
        if node is not None:  # One page of each 2 MiB: a slab that goes wrong goes no further.
            numa.verify_on_node(mapping, node, first, length, step_bytes=HUGE_BYTES)
