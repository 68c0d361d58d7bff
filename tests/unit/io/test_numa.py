"""Memory lies on the node it was bound to, or somebody is told where it lies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.io import memory as pages
from kvtier.io.nodes import read_nodes
from kvtier.io.numa import (
    ABSENT,
    WrongNode,
    bind_to_node,
    count_pages_by_node,
    elsewhere_text,
    verify_on_node,
)
from kvtier.memory import HUGE_BYTES, Mapping

LENGTH = 2 * HUGE_BYTES
PAGE = os.sysconf("SC_PAGESIZE")


def here() -> int:
    """A node of this machine that has memory."""
    found = [node.index for node in read_nodes() if node.memory_bytes]
    if not found:
        pytest.skip("the kernel tells nothing of NUMA nodes")
    return found[0]


@pytest.fixture
def mapping() -> Iterator[Mapping]:
    fd = pages.create_memfd("kvtier-test", LENGTH)
    mapping = Mapping(fd, LENGTH)
    os.close(fd)
    yield mapping
    mapping.close()


def bound(mapping: Mapping, node: int) -> None:
    try:
        bind_to_node(mapping, node)
    except PermissionError:
        pytest.skip("mbind is forbidden here (a container's seccomp profile)")


def test_pages_that_nobody_touched_are_absent_and_populated_ones_on_the_node(
    mapping: Mapping,
) -> None:
    node = here()
    bound(mapping, node)
    assert count_pages_by_node(mapping) == {ABSENT: LENGTH // PAGE}
    pages.populate(mapping, 0, HUGE_BYTES)
    half = HUGE_BYTES // PAGE
    assert count_pages_by_node(mapping) == {ABSENT: half, node: half}
    assert count_pages_by_node(mapping, step_bytes=HUGE_BYTES) == {ABSENT: 1, node: 1}
    verify_on_node(mapping, node, 0, HUGE_BYTES)
    with pytest.raises(WrongNode, match=f"of {2 * half} pages .* {half} do not exist"):
        verify_on_node(mapping, node)


def test_pages_on_another_node_are_refused_and_stay(mapping: Mapping) -> None:
    node = here()
    pages.populate(mapping, 0, LENGTH)
    with pytest.raises(WrongNode, match=f"should lie on node 77, {LENGTH // PAGE} lie on node"):
        verify_on_node(mapping, 77)
    verify_on_node(mapping, node)


@pytest.mark.parametrize("node", [63, 64, 900])
def test_a_node_that_is_not_there_is_refused_by_name(mapping: Mapping, node: int) -> None:
    if node in [one.index for one in read_nodes()]:
        pytest.skip("this machine has it")
    with pytest.raises(OSError, match=f"node {node}: (no such node|Operation not permitted)"):
        bind_to_node(mapping, node)


def test_the_text_names_every_place_that_is_not_the_node() -> None:
    assert elsewhere_text({3: 10}, 3) == ""
    assert elsewhere_text({ABSENT: 1, 0: 2, 3: 10}, 3) == (
        "of 13 pages asked for, which should lie on node 3, 1 do not exist, 2 lie on node 0"
    )


def test_the_rule_is_the_files_and_holds_for_who_maps_it_later(tmp_path: Path) -> None:
    node = here()
    fd = pages.create_memfd("kvtier-test", LENGTH)
    first, second = Mapping(fd, LENGTH), Mapping(fd, LENGTH)
    os.close(fd)
    bound(first, node)
    pages.populate(second, 0, LENGTH)
    verify_on_node(second, node)
    first.close()
    second.close()
