"""Memory of a CXL tier says what it is, how much there is, and who may map it."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import ConfigError
from kvtier.io.nodes import read_nodes
from kvtier.io.throttle import EmulatedSpeed
from kvtier.memory import Mapping
from kvtier.pools.cxl import CxlMemory, DaxMemory, EmulatedMemory, NodeMemory, measure_speed
from kvtier.pools.slabs import Slab
from kvtier.pools.stock import Outcome, SlabStock
from tests.support.dax_files import dax_file

MIB = 1 << 20
SLAB_BYTES = 4 * MIB
SPEED = EmulatedSpeed(0.5e9, 1e-6)


def node_memory(_: Path) -> CxlMemory:
    nodes = [node.index for node in read_nodes() if node.memory_bytes]
    if not nodes:
        pytest.skip("the kernel tells nothing of NUMA nodes")
    return NodeMemory(nodes[0], slab_bytes=SLAB_BYTES, budget_bytes=2 * SLAB_BYTES)


def shared_node_memory(_: Path) -> CxlMemory:
    memory = node_memory(_)
    return NodeMemory(
        int(memory.label.removeprefix("node ")),
        slab_bytes=SLAB_BYTES,
        budget_bytes=2 * SLAB_BYTES,
        is_single_tenant=True,
    )


def dax_memory(folder: Path) -> CxlMemory:
    device = dax_file(folder / "dax0.0", 2 * MIB + 2 * SLAB_BYTES)
    return DaxMemory(device, slab_bytes=SLAB_BYTES, generation=1)


def shared_dax_memory(folder: Path) -> CxlMemory:
    device = dax_file(folder / "dax0.0", 2 * MIB + 2 * SLAB_BYTES)
    return DaxMemory(device, slab_bytes=SLAB_BYTES, generation=1, is_single_tenant=True)


def emulated_memory(_: Path) -> CxlMemory:
    budget_bytes = 2 * SLAB_BYTES
    return EmulatedMemory(SPEED, SystemClock(), slab_bytes=SLAB_BYTES, budget_bytes=budget_bytes)


ALL = [node_memory, shared_node_memory, dax_memory, shared_dax_memory, emulated_memory]


@pytest.fixture
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CxlMemory]:
    memory: CxlMemory = request.param(tmp_path)
    yield memory
    memory.close()


def stocked(memory: CxlMemory) -> tuple[SlabStock, list[Slab]]:
    """All the slabs that there may be."""
    outcomes: queue.Queue[Outcome] = queue.Queue()
    stock = SlabStock(
        slab_bytes=memory.slab_bytes,
        slab_count_max=memory.slab_count_max,
        on_outcome=outcomes.put,
        clock=SystemClock(),
        source=memory.source,
        reserve_bytes=0,
    )
    assert stock.request(99) == memory.slab_count_max == 2
    slabs = [outcomes.get(timeout=20) for _ in range(2)]
    for slab in slabs:
        assert isinstance(slab, Slab), slab.reason
    return stock, [slab for slab in slabs if isinstance(slab, Slab)]


def released(stock: SlabStock, slabs: list[Slab]) -> None:
    for slab in slabs:
        stock.give_back(slab)
    stock.stop()


@pytest.mark.parametrize("memory", ALL, indirect=True)
def test_copies_bring_the_bytes_there_and_back(memory: CxlMemory) -> None:
    stock, slabs = stocked(memory)
    one, other = (slab.mapping.array[: 2 * MIB] for slab in slabs)
    one[:] = 7
    memory.copy_batch([other], [one])
    assert (other == 7).all()
    assert not slabs[1].mapping.array[2 * MIB :].any()
    del one, other
    released(stock, slabs)


@pytest.mark.parametrize("memory", [shared_node_memory, shared_dax_memory], indirect=True)
def test_a_client_that_may_map_a_slab_sees_its_bytes_and_no_others(memory: CxlMemory) -> None:
    stock, slabs = stocked(memory)
    for slab in slabs:
        slab.mapping.array[:] = slab.id
    for slab in slabs:
        given = memory.open_for_client(slab)
        assert given is not None
        mapping = Mapping(given.fd, slab.length_bytes, given.offset, writable=False)
        os.close(given.fd)
        assert (mapping.array == slab.id).all()
        mapping.close()
    released(stock, slabs)


@pytest.mark.parametrize("memory", [shared_node_memory], indirect=True)
def test_who_maps_a_nodes_slab_only_reads_it_and_keeps_it_when_it_is_given_back(
    memory: CxlMemory,
) -> None:
    """The daemon may end while an engine copies from it under a lease."""
    stock, slabs = stocked(memory)
    slabs[0].mapping.array[:] = 7
    given = memory.open_for_client(slabs[0])
    assert given is not None
    with pytest.raises(PermissionError):
        Mapping(given.fd, SLAB_BYTES)
    mapping = Mapping(given.fd, SLAB_BYTES, writable=False)
    os.close(given.fd)
    released(stock, slabs)
    assert (mapping.array == 7).all()
    mapping.close()


@pytest.mark.parametrize("memory", [node_memory, dax_memory, emulated_memory], indirect=True)
def test_where_engines_may_not_map_they_are_told_none(memory: CxlMemory) -> None:
    stock, slabs = stocked(memory)
    assert memory.open_for_client(slabs[0]) is None
    released(stock, slabs)


@pytest.mark.parametrize("memory", [emulated_memory], indirect=True)
def test_an_emulated_tier_says_so_and_is_as_slow_as_asked(memory: CxlMemory) -> None:
    assert memory.label == "emulated: 0.5 GB/s, 1000 ns"
    stock, slabs = stocked(memory)
    speed = measure_speed(memory, slabs[0], SystemClock())
    # Others may have the machine in between; that it is not slower without them, the throttle's
    # own tests show.
    for found in (speed.read_bytes_per_second, speed.write_bytes_per_second):
        assert 0.05e9 < found < 0.75e9
    stats = memory.throttle_stats()
    assert stats is not None
    assert stats.copied_bytes >= 2 * min(SLAB_BYTES, 4 * MIB)
    assert speed.dram_bytes_per_second > speed.read_bytes_per_second, "which is not slowed down"
    released(stock, slabs)


@pytest.mark.parametrize("memory", [node_memory, dax_memory], indirect=True)
def test_memory_that_is_not_emulated_says_where_it_is(memory: CxlMemory) -> None:
    assert "emulated" not in memory.label
    assert memory.label == memory.source.name
    assert memory.throttle_stats() is None


def test_too_small_a_budget_is_one_clear_line_and_frees_the_device(tmp_path: Path) -> None:
    device = dax_file(tmp_path / "dax0.0", 2 * MIB + 2 * SLAB_BYTES)
    with pytest.raises(ConfigError, match=r"dax0.0: 5 bytes hold no slab of 4194304"):
        DaxMemory(device, slab_bytes=SLAB_BYTES, generation=1, budget_bytes=5)
    memory = DaxMemory(device, slab_bytes=SLAB_BYTES, generation=1, budget_bytes=SLAB_BYTES)
    assert memory.slab_count_max == 1
    memory.close()
    with pytest.raises(ConfigError, match="hold no slab"):
        EmulatedMemory(SPEED, SystemClock(), slab_bytes=SLAB_BYTES, budget_bytes=MIB)
