"""Slabs of one node: bound, verified, and refused where they cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import ConfigError
from kvtier.io import numa
from kvtier.io.nodes import read_nodes
from kvtier.memory import HUGE_BYTES
from kvtier.pools import slabs
from kvtier.pools.slabs import PageKind, Slab, populate_slab, punch_slab
from kvtier.pools.source import MemorySource, SpreadSource, memory_source, placement_finding
from kvtier.types import SlabId
from tests.support.machine_trees import GIB, NodeTree, write_nodes

SLAB_BYTES = 2 * HUGE_BYTES


def node_here() -> int:
    found = [node.index for node in read_nodes() if node.memory_bytes]
    if not found:
        pytest.skip("the kernel tells nothing of NUMA nodes")
    return found[0]


def slab_on(node: int | None, kind: PageKind = PageKind.BASE) -> Slab:
    try:
        return populate_slab(SlabId(1), SLAB_BYTES, kind, clock=SystemClock(), node=node)
    except PermissionError:
        pytest.skip("mbind is forbidden here (a container's seccomp profile)")


def open_slabs() -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("kvtier-slab" in os.readlink(link) for link in links if os.path.islink(link))


@pytest.mark.parametrize("kind", [PageKind.BASE, PageKind.COLLAPSED])
def test_every_page_of_a_bound_slab_lies_on_its_node(kind: PageKind) -> None:
    node = node_here()
    slab = slab_on(node, kind)
    assert slab.node == node
    assert set(numa.count_pages_by_node(slab.mapping)) == {node}
    assert placement_finding(slab) == ""
    punch_slab(slab)


def test_a_slab_bound_to_nothing_makes_no_promise() -> None:
    slab = slab_on(None)
    assert slab.node is None
    assert placement_finding(slab) == ""
    punch_slab(slab)


def test_a_slab_whose_pages_lie_elsewhere_is_refused_and_leaves_nothing(monkeypatch) -> None:
    """The kernel that puts pages elsewhere in spite of the rule: here nobody has told it one."""
    node_here()
    monkeypatch.setattr(slabs.numa, "bind_to_node", lambda mapping, node: None)
    before = open_slabs()
    with pytest.raises(numa.WrongNode, match="should lie on node 77"):
        slab_on(77)
    assert open_slabs() == before


def test_a_single_page_elsewhere_is_seen_at_the_end(monkeypatch) -> None:
    """The sample of each step misses it, the full look does not."""
    real = numa.count_pages_by_node
    node = node_here()

    def one_strayed(mapping, first=0, length_bytes=None, *, step_bytes=0):
        counts = real(mapping, first, length_bytes, step_bytes=step_bytes)
        if step_bytes == 0:
            counts = {**counts, node: counts[node] - 1, node + 1: 1}
        return counts

    monkeypatch.setattr(numa, "count_pages_by_node", one_strayed)
    with pytest.raises(numa.WrongNode, match=f"1 lie on node {node + 1}"):
        slab_on(node)


def test_a_slab_that_strayed_later_is_found_by_a_sample(monkeypatch) -> None:
    node = node_here()
    slab = slab_on(node)
    strayed = Slab(slab.id, slab.fd, slab.mapping, slab.page_kind, 0, 0.0, node=77)
    finding = placement_finding(strayed)
    assert finding.startswith("slab 1: of 64 pages asked for, which should lie on node 77, 64 lie")
    punch_slab(slab)


def test_a_node_without_memory_or_not_online_is_a_mistake_in_the_configuration(
    tmp_path: Path,
) -> None:
    nodes = {0: NodeTree("0-7", 16, 8, "10 20"), 2: NodeTree("8-15", 0, 0, "20 10")}
    write_nodes(tmp_path, nodes)
    with pytest.raises(ConfigError, match=r"node 1 is not online; those with memory: 0"):
        MemorySource(1, tmp_path / "sys")
    with pytest.raises(ConfigError, match=r"node 2 has no memory; those with memory: 0"):
        MemorySource(2, tmp_path / "sys")
    assert MemorySource(0, tmp_path / "sys").name == "node 0"


def test_the_room_on_a_node_is_the_nodes_when_that_is_less(tmp_path: Path) -> None:
    """Past the end of a bound node the kernel kills processes instead of refusing."""
    write_nodes(tmp_path, {0: NodeTree("0-7", 16, 0.25, "10")})
    room_bytes = MemorySource(0, tmp_path / "sys").room_bytes()
    assert room_bytes is not None
    assert room_bytes <= GIB // 4


def test_slabs_are_spread_evenly_over_their_nodes(tmp_path: Path, monkeypatch) -> None:
    """Nodes of a tree of files: where pages go is not asked."""
    write_nodes(tmp_path, {0: NodeTree("0", 16, 8, "10 20"), 2: NodeTree("1", 16, 8, "20 10")})
    monkeypatch.setattr(slabs.numa, "bind_to_node", lambda mapping, node: None)
    monkeypatch.setattr(slabs.numa, "verify_on_node", lambda *args, **kwargs: None)
    source = SpreadSource((0, 2), tmp_path / "sys")

    def populate(number: int) -> Slab:
        return source.populate(
            SlabId(number), SLAB_BYTES, clock=SystemClock(), is_cancelled=lambda: False
        )

    made = [populate(number) for number in range(4)]
    assert [slab.node for slab in made] == [0, 2, 0, 2]
    for slab in (made[1], made[3]):
        source.end(slab)
    with pytest.raises(slabs.PopulateCancelled):
        source.populate(SlabId(8), SLAB_BYTES, clock=SystemClock(), is_cancelled=lambda: True)
    again = [populate(number) for number in (5, 6)]
    assert [slab.node for slab in again] == [2, 2], "what has gone leaves room"
    for slab in (made[0], made[2], *again):
        source.end(slab)


def test_one_node_or_none_needs_no_spreading() -> None:
    assert memory_source(()).name == "memory"
    assert memory_source((node_here(),)).name == f"node {node_here()}"
    with pytest.raises(ConfigError, match="is not online"):
        memory_source((node_here(), 1001))
