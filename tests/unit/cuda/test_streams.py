"""Copies on our streams: right bytes for every layout, in an order that no interleaving breaks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvtier.cuda.copy_paths import CopyPath, PathLimits
from kvtier.cuda.copy_plan import Piece
from kvtier.cuda.device_layout import DeviceTensor, layout_of
from kvtier.cuda.errors import CudaBroken, CudaCode, CudaRefused
from kvtier.cuda.fake import FakeCudart, FakeDevice
from kvtier.cuda.fake_copies import ProcessDied
from kvtier.cuda.race_checker import DataRace
from kvtier.cuda.runtime import Stream
from kvtier.cuda.streams import CopyStreams, CopyTicket, Withdrawn
from kvtier.errors import StaleSlot
from tests.support.copy_rig import CopyRig
from tests.support.kv_layouts import LAYOUTS, DeviceKv, Sizes
from tests.support.twin_kernels import TwinKernels

TINY = PathLimits(small_run_bytes=64, piece_bytes_max=1500, piece_runs_max=5)
DEVICES = {
    "batches": FakeDevice(),
    "aliases": FakeDevice(is_aliased=True),
    "no batches": FakeDevice(has_batches=False),
    "nothing pinned": FakeDevice(can_register=False),
}
SIZES = {
    "even": Sizes(blocks=10),
    "odd": Sizes(layers=3, blocks=9, heads=3, tokens=5, width=7),
    "one of each": Sizes(layers=1, blocks=8, heads=1, tokens=1, width=1),
}


def rig_of(
    name: str = "split",
    *,
    seed: int | None = None,
    device: FakeDevice | None = None,
    sizes: Sizes | None = None,
    limits: PathLimits = TINY,
) -> CopyRig:
    cuda = FakeCudart(seed=seed, device=device)
    return CopyRig(cuda, LAYOUTS[name](cuda, sizes or SIZES["even"]), limits=limits)


def round_trip(rig: CopyRig) -> None:
    """Blocks into slots and from there into other blocks; nothing else changes."""
    for slab in rig.slabs:
        slab.array.fill(0x55)
    rig.scramble()
    blocks, slots = [6, 1, 2, 3, 0], [7, 0, 1, 2, 5]
    expected = [rig.kv.block_bytes(block) for block in blocks]
    rig.offload(blocks, slots)
    [stored] = rig.run()
    assert stored.failed is None
    assert stored.bytes_count == 5 * rig.shard_bytes
    for slot, block_bytes in zip(slots, expected, strict=True):
        assert (rig.slot_bytes_of(slot) == block_bytes).all()
    total = sum(int((slab.array != 0x55).sum()) for slab in rig.slabs)
    assert total == sum(int((found != 0x55).sum()) for found in expected), "bytes beside the slots"

    rig.scramble()
    targets = [3, 7, 5, 1, 6]
    before = [rig.kv.block_bytes(block) for block in range(8)]
    rig.onboard(targets, slots)
    [loaded] = rig.run()
    assert loaded.failed is None
    for block in range(8):
        wanted = expected[targets.index(block)] if block in targets else before[block]
        assert (rig.kv.block_bytes(block) == wanted).all()
    rig.close()


@pytest.mark.slow  # Some of them.
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_goes_out_and_comes_back(name: str, sizes: str, device: str) -> None:
    round_trip(rig_of(name, sizes=SIZES[sizes], device=DEVICES[device]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_right_in_other_interleavings(name: str, seed: int) -> None:
    round_trip(rig_of(name, seed=seed))


def test_groups_of_several_layouts_share_the_streams() -> None:
    cuda = FakeCudart()
    first = CopyRig(cuda, LAYOUTS["packed LBHNC"](cuda, Sizes(blocks=9)), limits=TINY)
    group = LAYOUTS["MLA"](cuda, Sizes(layers=2, blocks=4, tokens=8))
    np.copyto(group.memory, np.random.default_rng(5).integers(0, 256, len(group.memory), np.uint8))
    first.scramble()
    size = group.layout.shard_bytes
    assert size <= first.slot_bytes
    first.offload([4], [0])
    first.streams.offload(group.layout, [2], [first.slots[6]], first.streams.mark(first.compute))
    assert [ticket.failed for ticket in first.run()] == [None, None]
    assert (first.slot_bytes_of(0) == first.kv.block_bytes(4)).all()
    assert (first.slot_bytes_of(6)[:size] == group.block_bytes(2)).all()
    first.close()


def test_a_cache_that_is_contiguous_for_each_request_is_a_layout_for_each() -> None:
    """vAttention: virtual addresses in a row, a stride between requests that is no multiple."""
    cuda = FakeCudart()
    block_bytes, block_count, request_step = 4 * 2 * 8 * 2, 6, 1 << 12
    address = cuda.allocate_device(2 * request_step * 2)
    memory = cuda.device_bytes(address, 4 * request_step)
    shape, strides = (block_count, 4, 2, 8), (block_bytes, 32, 16, 2)
    tensors = [
        DeviceTensor(address + (request * 2 + kv) * request_step, shape, strides, 2)
        for request in range(2)
        for kv in range(2)
    ]
    requests = [DeviceKv(cuda, tensors[first : first + 2], memory) for first in (0, 2)]
    rig = CopyRig(cuda, requests[0], limits=TINY)
    rig.scramble()
    rig.offload([5, 0], [0, 1])
    second = layout_of(tensors[2:])
    rig.streams.offload(second, [3], [rig.slots[4]], rig.streams.mark(rig.compute))
    rig.run()
    assert (rig.slot_bytes_of(0) == requests[0].block_bytes(5)).all()
    first = 2 * request_step + 3 * block_bytes
    keys = memory[first:][:block_bytes]
    values = memory[first + request_step :][:block_bytes]
    assert (rig.slot_bytes_of(4) == np.concatenate([keys, values])).all()
    rig.close()


def test_a_part_of_the_layers_can_come_first() -> None:
    rig = rig_of("packed LBHNC")
    rig.scramble()
    expected = rig.kv.block_bytes(2)
    rig.offload([2], [0])
    rig.run()
    rig.scramble()
    for layer in range(3):
        part = rig.kv.layout.part(layer, layer + 1)
        rig.streams.onboard(part, [5], [rig.slots[0]], rig.streams.mark(rig.compute))
    assert len(rig.run()) == 3
    assert (rig.kv.block_bytes(5) == expected).all()
    rig.close()


# ---------------------------------------------------------------------------------------- order


def serve(rig: CopyRig) -> None:
    """Some steps of an engine: it computes, offloads, reuses blocks, onboards, reads."""
    seen: list[int] = []
    for step in range(3):
        value = 10 * (step + 1)
        rig.compute_fill(0, value)
        rig.compute_fill(1, value + 1)
        stores = [rig.offload([0], [2 * step]), rig.offload([1], [2 * step + 1])]
        rig.streams.pump()
        rig.compute_read(2, [])
        for store in stores:
            rig.streams.follow(rig.compute, store)
        rig.compute_fill(0, 99)  # The next request's.
        rig.compute_fill(1, 98)
        rig.run()
        assert set(rig.slot_bytes_of(2 * step).tolist()) == {value}
        assert set(rig.slot_bytes_of(2 * step + 1).tolist()) == {value + 1}
        rig.compute_read(2, [])  # Still going on when the load is asked for.
        load = rig.onboard([2, 3], [2 * step, 2 * step + 1])
        rig.streams.follow(rig.compute, load)
        found: list[int] = []
        rig.compute_read(2, found)
        rig.compute_read(3, found)
        rig.run()
        rig.cuda.synchronize_stream(rig.compute)
        assert set(found) == {value, value + 1}
        seen += found
    assert seen


@pytest.mark.slow
def test_an_engine_s_steps_are_clean_and_right_in_200_interleavings() -> None:
    for seed in range(200):
        rig = rig_of("split", seed=seed, sizes=Sizes(layers=2, blocks=8, tokens=2))
        serve(rig)
        rig.close()


def test_an_engine_s_steps_wait_for_nothing() -> None:
    rig = rig_of()
    rig.run()
    serve(rig)
    assert rig.cuda.synchronize_count == 3, "the test's own"


Plant = Callable[[pytest.MonkeyPatch], None]


def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCudart, "wait_event", lambda self, stream, event: None)


def without_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyStreams, "follow", lambda self, stream, ticket: self.pump())


def done_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCudart, "is_event_done", lambda self, event: True)


@pytest.mark.parametrize("plant", [without_waits, without_follow, done_too_early])
def test_each_rule_of_the_order_is_needed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of()
    plant(monkeypatch)
    with pytest.raises(DataRace):
        serve(rig)


def test_loads_come_before_stores_that_were_asked_for_earlier() -> None:
    rig = rig_of("cross-layer tensor")
    rig.offload([0, 1, 2, 3], [0, 1, 2, 3])
    rig.onboard([4, 5], [4, 5])
    rig.run()
    names = [operation.engine.name for operation in rig.cuda.timeline.history]
    last_load = max(index for index, name in enumerate(names) if name == "HOST_TO_DEVICE")
    assert "DEVICE_TO_HOST" not in names[:last_load]
    rig.close()


def test_first_layers_of_all_loads_come_before_the_last_ones_of_any() -> None:
    cuda = FakeCudart()
    rig = CopyRig(cuda, LAYOUTS["cross-layer tensor"](cuda, SIZES["even"]))
    places = [rig.slots[slot] for slot in (0, 1)]
    layers = rig.kv.layout.by_layer(3)
    tickets = [
        rig.streams.onboard(layer, [block], [place], rig.streams.mark(rig.compute), turn=turn)
        for block, place in enumerate(places)
        for turn, layer in enumerate(layers)
    ]
    targets = rig.targets_in_order()
    rig.run()
    first, second = tickets[:3], tickets[3:]
    expected = [ticket for pair in zip(first, second, strict=True) for ticket in pair]
    starts = [int(t.layout.addresses[0] + t.layout.steps[0] * t.device_blocks[0]) for t in expected]
    assert targets == starts
    rig.close()


def test_submitting_gives_way_to_an_engine_that_follows_a_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = rig_of("cross-layer tensor")
    loads = [rig.onboard([block], [block]) for block in range(4)]
    submit = rig.streams._submitter.submit
    follower = threading.Thread(target=lambda: rig.streams.follow(rig.compute, loads[1]))
    submitters: list[threading.Thread] = []

    def note(piece: Piece, stream: Stream) -> None:
        submit(piece, stream)
        submitters.append(threading.current_thread())
        if len(submitters) == 1:
            follower.start()
            while not rig.streams._is_followed:
                pass

    monkeypatch.setattr(rig.streams._submitter, "submit", note)
    rig.streams.pump()
    follower.join()
    assert submitters[0] is threading.current_thread()
    assert set(submitters[1:]) == {follower}
    assert [load.is_queued for load in loads] == [True, True, False, False]
    assert len(rig.run()) == 4
    rig.close()


def test_stores_pause_while_a_load_waits_for_its_turn() -> None:
    cuda = FakeCudart()
    kv = LAYOUTS["cross-layer tensor"](cuda, SIZES["even"])
    rig = CopyRig(cuda, kv, limits=TINY, in_flight_bytes_max=1)
    store = rig.offload([0, 1, 2, 3], [0, 1, 2, 3])
    rig.streams.pump()
    first = store.bytes_count
    assert 0 < first < 4 * rig.shard_bytes
    load = rig.onboard([4, 5, 6, 7], [4, 5, 6, 7])
    rig.streams.pump()
    cuda.advance(1e-3)
    rig.streams.pump()
    assert load.bytes_count > 0
    assert store.bytes_count == first
    rig.run()
    assert store.bytes_count == load.bytes_count == 4 * rig.shard_bytes
    rig.close()


def test_whoever_follows_a_copy_that_has_ended_waits_for_nothing() -> None:
    """Its event is another copy's by then."""
    rig = rig_of()
    ended = rig.offload([0], [0])
    rig.run()
    rig.compute_fill(1, 1, seconds=1e-2)
    rig.offload([1], [1])
    rig.streams.pump()
    other, event = rig.cuda.create_stream(0), rig.cuda.create_event()
    rig.streams.follow(other, ended)
    rig.cuda.record_event(event, other)
    rig.cuda.advance(1e-3)
    assert rig.cuda.is_event_done(event)
    rig.run()
    rig.close()


# -------------------------------------------------------------------------------------- failures


def test_a_copy_that_is_called_off_ends_when_what_was_queued_has_ended() -> None:
    cuda = FakeCudart()
    kv = LAYOUTS["cross-layer tensor"](cuda, SIZES["even"])
    rig = CopyRig(cuda, kv, limits=TINY, in_flight_bytes_max=1)
    running, waiting = rig.offload([0, 1, 2], [0, 1, 2]), rig.offload([3], [3])
    rig.streams.pump()
    rig.streams.withdraw(running)
    rig.streams.withdraw(waiting)
    assert rig.streams._ended == [waiting], "nothing of it was queued"
    rig.streams.follow(rig.compute, running)
    rig.compute_fill(0, 1)
    assert rig.run() == [waiting, running]
    assert isinstance(running.failed, Withdrawn)
    rig.close()


def test_slots_in_no_slab_fail_their_copy_alone() -> None:
    rig = rig_of()
    bad = rig.streams.offload(rig.kv.layout, [0], [4096], rig.streams.mark(rig.compute))
    good = rig.offload([1], [1])
    assert rig.run() == [bad, good]
    assert isinstance(bad.failed, StaleSlot)
    assert good.failed is None
    rig.close()


def test_a_slab_that_is_given_up_is_unregistered_after_its_last_copy() -> None:
    rig = rig_of()
    rig.offload([0], [0])
    rig.streams.pump()
    assert not rig.registry.give_up(rig.slabs[0].address)
    rig.run()
    assert rig.registry.give_up(rig.slabs[0].address)
    assert rig.cuda.memory.host.registrations == {}
    late = rig.offload([1], [1])
    rig.run()
    assert isinstance(late.failed, StaleSlot)
    rig.close()


def test_a_refused_batch_goes_by_plain_copies_and_so_do_all_later_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def refuse(self: FakeCudart, *arguments: object) -> None:
        calls.append(1)
        raise CudaRefused("cuMemcpyBatchAsync", CudaCode.INVALID_VALUE)

    monkeypatch.setattr(FakeCudart, "copy_batch", refuse)
    rig = rig_of()
    with caplog.at_level(logging.WARNING):
        round_trip(rig)
    assert len(calls) == len(caplog.records) == 1
    assert not rig.streams.support.has_batches


def test_a_copy_that_is_refused_in_the_middle_ends_after_what_was_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = rig_of(device=FakeDevice(has_batches=False))
    copies: list[int] = []
    plain = FakeCudart.copy

    def copy(self: FakeCudart, *arguments: int) -> None:
        copies.append(1)
        if len(copies) == 4:
            raise CudaRefused("cudaMemcpyAsync", CudaCode.INVALID_VALUE)
        plain(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeCudart, "copy", copy)
    rig.compute_fill(0, 1, seconds=1e-3)
    ticket = rig.offload([0, 1], [0, 1])
    assert rig.streams.poll() == []
    assert isinstance(ticket.failed, CudaRefused), "told, and still three copies in flight"
    assert rig.run() == [ticket]
    rig.slot_bytes_of(0)
    rig.close()


def test_a_lost_context_fails_every_copy_and_gives_no_slab_back() -> None:
    rig = rig_of()
    rig.cuda.copies.fail_copy(CudaCode.ILLEGAL_ADDRESS, after_count=1)
    tickets = [rig.offload([0, 1, 2, 3], [0, 1, 2, 3]), rig.onboard([4, 5], [4, 5])]
    ended: list[CopyTicket] = []
    for _ in range(50):
        rig.cuda.advance(1e-5)
        ended += rig.streams.poll()
    assert sorted(map(id, ended)) == sorted(map(id, tickets))
    assert all(isinstance(ticket.failed, CudaBroken) for ticket in ended)
    assert rig.streams.is_idle
    assert not rig.registry.give_up(rig.slabs[1].address), "the load's"
    with pytest.raises(CudaBroken):
        rig.offload([0], [0])


def test_a_process_that_dies_in_mid_copy_has_told_nobody_that_it_ended() -> None:
    rig = rig_of()
    rig.scramble()
    rig.cuda.copies.die_after_bytes = rig.shard_bytes * 3 // 2
    rig.offload([0, 1, 2], [0, 1, 2])
    with pytest.raises(ProcessDied):
        rig.run()
    assert rig.streams._ended == []
    assert not rig.streams.is_idle
    assert rig.cuda.copies.copied_bytes == rig.shard_bytes * 3 // 2


# --------------------------------------------------------------------------------------- kernels


KERNEL_LIMITS = PathLimits(small_run_bytes=4096, kernel_count_min=2, piece_runs_max=7)


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("is_aliased", [False, True])
def test_short_runs_go_by_kernels_and_by_batches_if_those_are_refused(
    is_aliased: bool, is_refused: bool
) -> None:
    cuda = FakeCudart(device=FakeDevice(is_aliased=is_aliased))
    kernels = TwinKernels(cuda)
    kernels.refuse = is_refused
    kv = LAYOUTS["split"](cuda, SIZES["odd"])
    rig = CopyRig(cuda, kv, limits=KERNEL_LIMITS, kernels=kernels)
    round_trip(rig)
    assert kernels.paths == (set() if is_refused else {CopyPath.KERNEL, CopyPath.STAGED})
    assert rig.streams.support.has_kernels is not is_refused


def test_stores_wait_until_they_may_and_loads_do_not() -> None:
    cuda = FakeCudart()
    asked: list[int] = []
    allowance = [0]

    def may_store(bytes_count: int) -> bool:
        asked.append(bytes_count)
        allowance[0] -= 1
        return allowance[0] >= 0

    rig = CopyRig(cuda, LAYOUTS["split"](cuda, Sizes()), may_store=may_store)
    stores = [rig.offload([block], [block]) for block in range(3)]
    load = rig.onboard([4], [4])
    ended = []
    for _ in range(200):
        ended += rig.streams.poll()
        cuda.advance(5e-6)
    assert ended == [load]
    assert set(asked) == {rig.shard_bytes}
    allowance[0] = 1
    for _ in range(200):
        ended += rig.streams.poll()
        cuda.advance(5e-6)
    assert ended == [load, stores[0]]
    # Who overwrites the blocks next does not wait for permission.
    rig.streams.follow(rig.compute, stores[2])
    rig.compute_fill(2, 9)
    allowance[0] = 0
    for _ in range(200):
        ended += rig.streams.poll()
        cuda.advance(5e-6)
    assert ended == [load, *stores]
    rig.close()
