"""Slabs on a node without processors are there, for everybody who maps them, or are refused."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.clock import SystemClock
from kvtier.io import numa
from kvtier.io.nodes import node_room_bytes, read_node, read_nodes
from kvtier.memory import Mapping
from kvtier.pools import slabs
from kvtier.pools.dram import DramPool
from kvtier.pools.pool import SlabBinding
from kvtier.pools.slabs import PageKind, Slab, populate_slab
from kvtier.pools.source import MemorySource, placement_finding
from kvtier.pools.stock import Outcome, PopulateRefused, SlabStock
from kvtier.types import SlabId, SlabSetId

MIB = 1 << 20
SLAB_BYTES = 16 * MIB
WAIT_SECONDS = 60

pytestmark = pytest.mark.cxl


@pytest.fixture
def outcomes() -> queue.Queue[Outcome]:
    return queue.Queue()


@pytest.fixture
def stock(node: int, outcomes: queue.Queue[Outcome]) -> Iterator[SlabStock]:
    stock = SlabStock(
        slab_bytes=SLAB_BYTES,
        slab_count_max=64,
        on_outcome=outcomes.put,
        clock=SystemClock(),
        source=MemorySource(node),
        reserve_bytes=16 * MIB,
        parallel=1,
    )
    yield stock
    stock.stop()


def taken(outcomes: queue.Queue[Outcome]) -> Slab:
    slab = outcomes.get(timeout=WAIT_SECONDS)
    assert isinstance(slab, Slab), slab.reason
    return slab


def test_sysfs_tells_a_node_with_memory_and_without_processors(node: int) -> None:
    found = read_node(node)
    assert found is not None
    assert found.has_only_memory
    assert found.free_bytes > (node_room_bytes(node) or 0) > SLAB_BYTES
    near = next(one for one in read_nodes() if one.cpus)
    assert (near.distance_to(node) or 0) > 10


def test_every_page_of_every_slab_lies_on_the_node(stock, outcomes, node: int) -> None:
    stock.request(2)
    for _ in range(2):
        slab = taken(outcomes)
        assert (slab.node, placement_finding(slab)) == (node, "")
        pages = slab.length_bytes // mmap.PAGESIZE
        assert numa.count_pages_by_node(slab.mapping) == {node: pages}
        assert not slab.mapping.array.any()
        stock.give_back(slab)


@pytest.mark.parametrize("kind", [PageKind.BASE, PageKind.COLLAPSED, PageKind.HUGETLB])
def test_so_do_the_pages_of_each_kind(node: int, kind: PageKind) -> None:
    slab = populate_slab(SlabId(1), SLAB_BYTES, kind, clock=SystemClock(), node=node)
    assert set(numa.count_pages_by_node(slab.mapping)) == {node}
    slabs.punch_slab(slab)


def test_a_process_that_maps_the_slab_finds_the_bytes_and_the_pages_there(
    stock, outcomes, node: int
) -> None:
    stock.request(1)
    slab = taken(outcomes)
    slab.mapping.array[:: 1 << 16] = 7
    child = os.fork()
    if child == 0:
        code = 1
        try:
            mapping = Mapping(slab.fd, SLAB_BYTES)
            is_right = (mapping.array[:: 1 << 16] == 7).all()
            mapping.array[1] = 9
            lies_right = set(numa.count_pages_by_node(mapping, step_bytes=1 << 16)) == {node}
            code = 0 if is_right and lies_right else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert slab.mapping.array[1] == 9
    stock.give_back(slab)


def test_a_pool_on_the_node_keeps_its_blocks_there(stock, outcomes, node: int) -> None:
    stock.request(2)
    pool = DramPool(generation=1)
    ids = []
    for _ in range(2):
        slab = taken(outcomes)
        pool.add_slab(slab)
        ids.append(slab.id)
    slot_bytes = 2 * MIB
    count = SLAB_BYTES // slot_bytes
    pool.bind(SlabBinding(SlabSetId(1), tuple(ids), bytes(16), 0, count, slot_bytes, slot_bytes))
    for slot in range(count):
        for shard, view in enumerate(pool.views(slot)):
            np.copyto(view, np.uint8(slot * 2 + shard + 1))
    for slot in range(count):
        for shard, view in enumerate(pool.views(slot)):
            assert (view == slot * 2 + shard + 1).all()
    assert pool.check_placement() == []
    pool.close()


def test_a_full_node_refuses_and_nobody_is_killed(stock, outcomes, node: int) -> None:
    """More than it has: without asking for the room first, the kernel would end this process."""
    before_bytes = node_room_bytes(node) or 0
    asked = before_bytes // SLAB_BYTES + 3
    assert stock.request(asked) == asked, "the node is larger than this test thinks"
    made, refused = [], []
    for _ in range(asked):
        outcome = outcomes.get(timeout=WAIT_SECONDS)
        (refused if isinstance(outcome, PopulateRefused) else made).append(outcome)
    assert refused, "nothing was refused"
    assert f"MiB of node {node} are available" in refused[0].reason
    assert len(made) >= asked // 2
    for slab in made:
        assert set(numa.count_pages_by_node(slab.mapping, step_bytes=2 * MIB)) == {node}
        stock.give_back(slab)
    assert (node_room_bytes(node) or 0) > before_bytes - SLAB_BYTES


def test_pages_that_came_from_elsewhere_are_refused(node: int, monkeypatch) -> None:
    """Populated without the rule, on a machine with two nodes: the kernel takes the near one."""
    monkeypatch.setattr(slabs.numa, "bind_to_node", lambda mapping, node: None)
    with pytest.raises(numa.WrongNode, match=rf"should lie on node {node}, \d+ lie on node 0"):
        populate_slab(SlabId(1), SLAB_BYTES, PageKind.BASE, clock=SystemClock(), node=node)


def test_pages_that_the_kernel_moved_later_are_found(stock, outcomes, node: int) -> None:
    stock.request(1)
    slab = taken(outcomes)
    slab.mapping.array[:] = 5
    moved = move_pages(slab.mapping, SLAB_BYTES // 4, to=0)
    assert moved > 0, "the kernel moved nothing"
    finding = placement_finding(slab)
    assert f"slab {slab.id}: of 64 pages" in finding
    assert "lie on node 0" in finding
    assert (slab.mapping.array == 5).all(), "moved bytes are the same"
    stock.give_back(slab)


def move_pages(mapping: Mapping, length_bytes: int, *, to: int) -> int:
    """As memory pressure may with demotion on; how many pages lie on `to` afterwards."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = np.arange(mapping.address, mapping.address + length_bytes, 4096, dtype=np.uint64)
    nodes = np.full(len(pages), to, np.int32)
    status = np.full(len(pages), -1, np.int32)
    libc.syscall(
        ctypes.c_long({"x86_64": 279, "aarch64": 239}[os.uname().machine]),
        ctypes.c_int(0),
        ctypes.c_ulong(len(pages)),
        ctypes.c_void_p(pages.ctypes.data),
        ctypes.c_void_p(nodes.ctypes.data),
        ctypes.c_void_p(status.ctypes.data),
        ctypes.c_int(2),  # MPOL_MF_MOVE
    )
    return int((status == to).sum())
