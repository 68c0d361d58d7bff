"""Slabs: pinned when used, kept while used, given up exactly."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from kvtier.cuda import numa
from kvtier.cuda.errors import CudaBroken, CudaCode, CudaRefused
from kvtier.cuda.fake import FakeCudart, FakeDevice
from kvtier.cuda.fake_memory import RegistrationLimits
from kvtier.cuda.registration import SLAB_BYTES_MAX, WARM_PAUSE_SECONDS, SlabRegistry, SlabState
from kvtier.cuda.runtime import Direction
from kvtier.errors import BadRequest, StaleSlot
from tests.support.pinned import HostSlab

MIB = 1 << 20
GIB = 1 << 30


def registry_of(cuda: FakeCudart, *places: int) -> SlabRegistry:
    """Slabs of 1 GiB that nobody touches, so nothing need be mapped."""
    registry = SlabRegistry(cuda)
    for place in places:
        registry.add(place * GIB, GIB)
    return registry


def at(*addresses: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(addresses, np.uint64)


def test_a_slab_is_registered_as_a_whole_when_it_is_first_used() -> None:
    cuda = FakeCudart()
    registry = registry_of(cuda, 4, 2, 9)
    assert cuda.memory.host.registrations == {}
    [slab, same] = registry.take(at(4 * GIB + MIB, 4 * GIB), MIB)
    assert slab is same
    assert cuda.memory.host.registrations == {4 * GIB: GIB}
    registry.end_use([slab, same])
    assert registry.registered_bytes == GIB
    registry.check_invariants()


def test_the_device_s_address_of_a_slab_is_kept() -> None:
    cuda = FakeCudart(device=FakeDevice(is_aliased=True))
    [slab] = registry_of(cuda, 4).take(at(4 * GIB), MIB)
    assert slab.alias == cuda.device_address(4 * GIB + 17) - (4 * GIB + 17) != 0


@pytest.mark.parametrize("address", [4 * GIB - 1, 5 * GIB - MIB + 1, GIB, 6 * GIB])
def test_what_lies_in_no_slab_or_straddles_two_is_refused_and_nothing_is_held(
    address: int,
) -> None:
    cuda = FakeCudart()
    registry = registry_of(cuda, 4, 5)
    with pytest.raises(StaleSlot):
        registry.take(at(4 * GIB, address), MIB)
    assert cuda.memory.host.registrations == {}
    registry.close()


def test_slabs_do_not_overlap_and_have_a_size() -> None:
    registry = registry_of(FakeCudart(), 4)
    for address, length in [
        (4 * GIB - 1, 2),
        (5 * GIB - 1, 2),
        (4 * GIB + 5, 1),
        (9 * GIB, 0),
        (99 * GIB, SLAB_BYTES_MAX + 1),
    ]:
        with pytest.raises(BadRequest):
            registry.add(address, length)
    registry.add(5 * GIB, 1)


def test_a_slab_that_is_not_used_is_unregistered_at_once() -> None:
    cuda = FakeCudart()
    registry = registry_of(cuda, 4, 5)
    for place in (4, 5):
        registry.end_use(registry.take(at(place * GIB), MIB))
    assert registry.give_up(4 * GIB)
    assert cuda.memory.host.registrations == {5 * GIB: GIB}
    assert registry.give_up(4 * GIB), "asking again is allowed"
    registry.close()
    cuda.assert_clean()


@pytest.mark.parametrize("can_register", [True, False])
def test_a_slab_in_use_is_given_up_by_its_last_user_and_has_no_new_ones(
    can_register: bool,
) -> None:
    cuda = FakeCudart(device=FakeDevice(can_register=can_register))
    registry = registry_of(cuda, 4)
    first, second = registry.take(at(4 * GIB), MIB), registry.take(at(4 * GIB), MIB)
    assert not registry.give_up(4 * GIB)
    with pytest.raises(StaleSlot, match="given up"):
        registry.take(at(4 * GIB), MIB)
    registry.end_use(first)
    assert not registry.give_up(4 * GIB)
    assert bool(cuda.memory.host.registrations) is can_register
    registry.end_use(second)
    assert registry.give_up(4 * GIB)
    cuda.assert_clean()


def test_a_refused_slab_is_pageable_once_and_for_all(caplog: pytest.LogCaptureFixture) -> None:
    limits = RegistrationLimits(total_bytes_max=GIB)
    cuda = FakeCudart(device=FakeDevice(registration=limits))
    registry = registry_of(cuda, 4, 5)
    with caplog.at_level(logging.WARNING):
        states = [registry.take(at(place * GIB), MIB)[0].state for place in (4, 5, 5)]
    assert states == [SlabState.REGISTERED, SlabState.PAGEABLE, SlabState.PAGEABLE]
    assert len(registry.refusals) == len(caplog.records) == 1
    assert cuda.take_error() == 0


def test_a_slab_without_an_address_on_the_device_is_pageable_and_not_left_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its host's address would be taken for the device's, which is a fault where they differ."""
    cuda = FakeCudart(device=FakeDevice(is_aliased=True))
    registry = registry_of(cuda, 4, 5)

    def refuse(self: FakeCudart, host_address: int) -> int:
        raise CudaRefused("cudaHostGetDevicePointer", CudaCode.INVALID_VALUE)

    monkeypatch.setattr(FakeCudart, "device_address", refuse)
    slabs = registry.take(at(4 * GIB, 5 * GIB), MIB)
    assert [slab.state for slab in slabs] == [SlabState.PAGEABLE] * 2
    assert cuda.memory.host.registrations == {}
    registry.end_use(slabs)
    assert registry.give_up(4 * GIB)
    registry.close()


def test_a_lost_context_leaves_no_slab_in_use_that_no_copy_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCudart()
    registry = registry_of(cuda, 4, 5)
    register = FakeCudart.register_host

    def break_at_the_second(self: FakeCudart, address: int, length_bytes: int) -> None:
        if address == 5 * GIB:
            self._broken = CudaCode.ILLEGAL_ADDRESS
        register(self, address, length_bytes)

    monkeypatch.setattr(FakeCudart, "register_host", break_at_the_second)
    with pytest.raises(CudaBroken):
        registry.take(at(4 * GIB, 5 * GIB), MIB)
    assert [slab.use_count for slab in registry._slabs] == [0, 0]


def test_warming_pins_one_slab_and_pauses() -> None:
    cuda = FakeCudart()
    registry = registry_of(cuda, 4, 5, 6)
    assert registry.warm(now=100.0)
    assert registry.warm(now=100.0 + WARM_PAUSE_SECONDS / 2)
    assert registry.registered_bytes == GIB
    assert registry.warm(now=100.0 + WARM_PAUSE_SECONDS)
    assert not registry.warm(now=200.0)
    assert not registry.warm(now=300.0)
    assert registry.registered_bytes == 3 * GIB
    assert cuda.now == pytest.approx(3 * GIB / 10e9, rel=0.01)


def test_a_slab_of_a_lost_context_is_not_said_to_be_gone() -> None:
    cuda = FakeCudart()
    slab = HostSlab(MIB)
    registry = SlabRegistry(cuda)
    registry.add(slab.address, MIB)
    used = registry.take(at(slab.address), MIB)
    cuda.copies.fail_copy(CudaCode.ILLEGAL_ADDRESS)
    stream = cuda.create_stream(0)
    device = cuda.allocate_device(MIB)
    cuda.copy(device, slab.address, MIB, Direction.HOST_TO_DEVICE, stream)
    cuda.advance(1.0)
    registry.give_up(slab.address)
    with pytest.raises(CudaBroken):
        registry.end_use(used)
    with pytest.raises(CudaBroken):
        registry.give_up(slab.address)


# ------------------------------------------------------------------------------------------ NUMA


def make_sysfs(root: Path) -> Path:
    device = root / "bus" / "pci" / "devices" / "0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("2\n")
    for node, distances in {0: "10 21 12 32", 1: "21 10 32 12", 2: "12 32 10 21"}.items():
        folder = root / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "distance").write_text(distances + "\n")
    (root / "devices" / "system" / "node" / "node3").mkdir()
    return root


def test_the_device_s_node_is_cuda_s_answer_or_the_kernel_s(tmp_path: Path) -> None:
    known = FakeCudart(device=FakeDevice(numa_node=1)).attributes(0)
    silent = FakeCudart().attributes(0)
    sysfs = make_sysfs(tmp_path)
    assert numa.device_node(known, sysfs) == 1
    assert numa.device_node(silent, sysfs) is None
    (sysfs / "bus" / "pci" / "devices" / silent.pci_bus).mkdir()
    node_file = sysfs / "bus" / "pci" / "devices" / silent.pci_bus / "numa_node"
    node_file.write_text("2")
    assert numa.device_node(silent, sysfs) == 2
    node_file.write_text("-1")
    assert numa.device_node(silent, sysfs) is None


@pytest.mark.parametrize(
    ("nodes", "near", "index"),
    [
        ([0, 2, 2], 2, 1),
        ([1, None, 0], 2, 1),  # Unknown may be near; what is known to be far is not.
        ([1, 3, 0], 2, 2),
        ([1, 3], 2, 1),
        ([1, 0], None, 0),
        ([None], 2, 0),
    ],
)
def test_the_nearest_arena_is_chosen(
    nodes: list[int | None], near: int | None, index: int, tmp_path: Path
) -> None:
    assert numa.nearest(nodes, near, make_sysfs(tmp_path)) == index


def test_a_touched_page_has_a_node_and_nothing_has_none() -> None:
    slab = HostSlab(MIB)
    slab.array.fill(1)
    node = numa.memory_node(slab.address)
    assert node is None or node >= 0
    assert numa.memory_node(4096) is None
