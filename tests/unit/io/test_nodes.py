"""NUMA nodes are read as the kernel writes them, gaps, silence and HMAT included."""

from __future__ import annotations

import mmap
from functools import partial
from pathlib import Path

from kvtier.io.nodes import node_room_bytes, read_node, read_nodes
from kvtier.io.sysfs import parse_list, read_fields, read_number
from tests.support.machine_trees import GIB, MIB, NodeTree, write_nodes, write_tree


def test_nodes_keep_their_numbers_and_distances_over_gaps(tmp_path: Path) -> None:
    write_nodes(
        tmp_path,
        {
            0: NodeTree(cpus="0-15,32-47", memory_gib=256, free_gib=100, distances="10 21 28"),
            1: NodeTree(cpus="16-31,48-63", memory_gib=256, free_gib=200, distances="21 10 14"),
            4: NodeTree(cpus="", memory_gib=128, free_gib=127, distances="28 14 10"),
        },
    )
    first, second, third = read_nodes(tmp_path / "sys")
    assert [first.index, second.index, third.index] == [0, 1, 4]
    assert (len(first.cpus), first.cpus[-1]) == (32, 47)
    assert [node.has_only_memory for node in (first, second, third)] == [False, False, True]
    assert second.distance_to(4) == 14
    assert second.distance_to(2) is None
    assert (third.memory_bytes, third.free_bytes) == (128 * GIB, 127 * GIB)


def test_file_pages_that_nobody_uses_count_as_room(tmp_path: Path) -> None:
    tree = NodeTree(cpus="0", memory_gib=8, free_gib=1, distances="10", idle_file_mib=512)
    write_nodes(tmp_path, {0: tree})
    room = partial(node_room_bytes, sysfs=tmp_path / "sys", zones=tmp_path / "zoneinfo")
    assert room(0) == GIB + 512 * MIB
    assert room(1) is None


def test_what_the_kernel_keeps_for_itself_is_no_room(tmp_path: Path) -> None:
    """A bound allocation that reaches into it has processes killed."""
    tree = NodeTree(cpus="0", memory_gib=8, free_gib=1, distances="10 20")
    write_nodes(tmp_path, {0: tree, 1: tree})
    zones = """Node 0, zone    DMA32
  pages free     700000
        min      100
        low      200
        high     1000
        protection: (0, 0, 24, 24)
      nr_free_pages 700000
Node 1, zone   Normal
  pages free     9
        high     4000
        protection: (0, 0, 0, 0)
Node 1, zone  Movable
        high     96
"""
    write_tree(tmp_path, {"zoneinfo": zones})
    room = partial(node_room_bytes, sysfs=tmp_path / "sys", zones=tmp_path / "zoneinfo")
    assert room(0) == GIB - 1024 * mmap.PAGESIZE
    assert room(1) == GIB - 4096 * mmap.PAGESIZE


def test_hmat_is_in_mib_and_the_processors_view_wins(tmp_path: Path) -> None:
    node = NodeTree(cpus="", memory_gib=64, free_gib=64, distances="10")
    access = "sys/devices/system/node/node0"
    write_nodes(tmp_path, {0: node})
    write_tree(
        tmp_path,
        {
            f"{access}/access0/initiators/read_bandwidth": "60000",
            f"{access}/access1/initiators/read_bandwidth": "24000",
            f"{access}/access1/initiators/write_bandwidth": "12000",
            f"{access}/access1/initiators/read_latency": "250",
            f"{access}/access1/initiators/node3/online": "1",
        },
    )
    found = read_node(0, tmp_path / "sys")
    assert found is not None
    seen = found.from_processors
    assert seen is not None
    assert seen.number == 1
    assert seen.initiators == (3,)
    assert seen.read_bytes_per_second == 24000 * MIB
    assert seen.write_bytes_per_second == 12000 * MIB
    assert (seen.read_latency_ns, seen.write_latency_ns) == (250, None)


def test_a_kernel_that_knows_nothing_of_nodes_has_none(tmp_path: Path) -> None:
    assert read_nodes(tmp_path / "sys") == []
    assert read_node(0, tmp_path / "sys") is None


def test_lists_numbers_and_fields_are_those_of_the_kernel(tmp_path: Path) -> None:
    assert parse_list("0-2,8,10-11\n") == (0, 1, 2, 8, 10, 11)
    assert parse_list("") == parse_list("none") == ()
    write_tree(tmp_path, {"hex": "0x10de\n", "bad": "many", "fields": "Node 1 MemFree:  8 kB\nx"})
    assert read_number(tmp_path / "hex") == 0x10DE
    assert read_number(tmp_path / "bad") is read_number(tmp_path / "none") is None
    assert read_fields(tmp_path / "fields") == {"MemFree": 8}
