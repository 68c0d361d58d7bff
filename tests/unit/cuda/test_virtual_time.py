"""What our copies cost in the fake's virtual time: shapes, not speeds of a real machine."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.cuda.copy_paths import PathLimits
from kvtier.cuda.fake import FakeCudart, FakeDevice
from kvtier.cuda.fake_timeline import Engine
from kvtier.cuda.runtime import Ranges
from kvtier.cuda.streams import CopyTicket
from tests.support.copy_rig import CopyRig
from tests.support.kv_layouts import LAYOUTS, Sizes

# A block of 2 MiB: 32 layers, 8 heads of 128 (keys and values side by side), 16 tokens, bf16.
LLAMA_8B = Sizes(layers=32, blocks=24, heads=8, tokens=16, width=256)
LINK = 54e9
BLOCKS = list(range(20))

pytestmark = pytest.mark.slow


def rig_of(name: str, *, device: FakeDevice | None = None, sizes: Sizes = LLAMA_8B) -> CopyRig:
    cuda = FakeCudart(device=device)
    rig = CopyRig(cuda, LAYOUTS[name](cuda, sizes), slot_count=40, limits=PathLimits())
    for slab in rig.slabs:  # A worker has done so before, at a low rate.
        rig.registry.end_use(rig.registry.take(np.array([slab.address], np.uint64), 1))
    return rig


def seconds_of(rig: CopyRig, *tickets: CopyTicket) -> float:
    """From now until all have ended."""
    start = rig.cuda.now
    ended = rig.run()
    assert sorted(map(id, ended)) == sorted(map(id, tickets))
    assert [ticket.failed for ticket in ended] == [None] * len(ended)
    return rig.cuda.now - start


def link_share(rig: CopyRig, seconds: float) -> float:
    return len(BLOCKS) * rig.shard_bytes / seconds / LINK


@pytest.mark.parametrize(
    ("name", "share", "both_ways"),
    [
        ("block-outermost BLHNC", 0.95, 0.6),
        # 640 runs of 64 KiB. Each costs the engine 0.1 us, and the host 0.5 us: stores begin when
        # all loads are submitted.
        ("packed LBHNC", 0.85, 0.75),
    ],
)
def test_blocks_of_2_mib_go_at_the_speed_of_the_link_each_way_and_both(
    name: str, share: float, both_ways: float
) -> None:
    rig = rig_of(name)
    assert rig.shard_bytes == 2 << 20
    down = seconds_of(rig, rig.offload(BLOCKS, BLOCKS))
    up = seconds_of(rig, rig.onboard(BLOCKS, BLOCKS))
    assert link_share(rig, down) > share
    assert link_share(rig, up) > share
    both = seconds_of(
        rig, rig.offload(BLOCKS[:10], BLOCKS[:10]), rig.onboard(BLOCKS[10:], BLOCKS[10:])
    )
    assert both < both_ways * max(down, up), "half as much each way at the same time"
    assert rig.cuda.synchronize_count == 0


def test_short_runs_are_what_a_block_outermost_layout_avoids() -> None:
    """64 heads x layers of 8 KiB each way: the cliff is upwards."""
    sizes = Sizes(layers=32, blocks=24, heads=4, tokens=16, width=64)
    seconds = {}
    for name in ("heads outside LHBNC", "block-outermost BLHNC"):
        rig = rig_of(name, sizes=sizes)
        seconds_of(rig, rig.offload(BLOCKS, BLOCKS))
        seconds[name] = seconds_of(rig, rig.onboard(BLOCKS, BLOCKS))
    assert seconds["heads outside LHBNC"] > 8 * seconds["block-outermost BLHNC"]


def test_copies_run_beside_compute_and_do_not_stretch_it() -> None:
    rig = rig_of("block-outermost BLHNC")
    store = rig.offload(BLOCKS[:10], BLOCKS[:10])  # Before the step that runs beside it.
    load = rig.onboard(BLOCKS[10:], BLOCKS[10:])
    start = rig.cuda.now
    for _ in range(32):
        rig.cuda.compute(rig.compute, 50e-6)
    done = rig.cuda.create_event()
    rig.cuda.record_event(done, rig.compute)
    assert len(rig.run()) == 2
    assert store.failed is load.failed is None
    while not rig.cuda.is_event_done(done):
        rig.cuda.advance(1e-6)
    assert rig.cuda.now - start < 1.05 * 32 * 50e-6
    assert rig.cuda.timeline.busy_seconds(Engine.DEVICE_TO_HOST) > 0.3e-3


def test_a_load_waits_for_no_store_and_for_at_most_what_is_in_flight() -> None:
    rig = rig_of("block-outermost BLHNC")
    for _ in range(3):
        rig.offload(BLOCKS, BLOCKS)
        rig.streams.pump()
    load = rig.onboard([20], [25])
    start = rig.cuda.now
    while load not in rig.streams.poll():
        rig.cuda.advance(1e-6)
    assert rig.cuda.now - start < 2 * rig.shard_bytes / LINK
    rig.run()


def test_pageable_memory_works_and_makes_the_copying_thread_wait() -> None:
    rig = rig_of("block-outermost BLHNC", device=FakeDevice(can_register=False))
    seconds = seconds_of(rig, rig.offload(BLOCKS, BLOCKS))
    assert link_share(rig, seconds) < 0.15
    assert rig.cuda.synchronize_count > 0


# ------------------------------------------------------------------------------------- by layers

LAYER_COUNT, LAYER_SECONDS = 32, 30e-6


def run_forward(rig: CopyRig, tickets: list[CopyTicket], *, is_synchronous: bool) -> float:
    """A step over blocks that come in layer by layer, and the offload of others behind it.

    Time has one host thread here: each layer's copies are submitted just before its kernels, and
    the rest by `poll`. In a worker, the copying thread does so meanwhile.
    """
    start = rig.cuda.now
    layout = rig.kv.layout
    places = [rig.slots[slot] for slot in BLOCKS]
    for layer in range(LAYER_COUNT):
        part = layout.part(layer, layer + 1)
        tickets.append(rig.streams.onboard(part, BLOCKS, places, rig.streams.mark(rig.compute)))
    tickets.append(rig.offload([20, 21, 22, 23], [30, 31, 32, 33]))
    for layer in range(LAYER_COUNT):
        rig.streams.follow(rig.compute, tickets[layer])
        if is_synchronous:
            rig.cuda.synchronize_stream(rig.compute)
        rig.cuda.compute(rig.compute, LAYER_SECONDS, reads=layer_ranges(rig, layer))
    done = rig.cuda.create_event()
    rig.cuda.record_event(done, rig.compute)
    while not (rig.cuda.is_event_done(done) and rig.streams.is_idle):
        rig.streams.poll()
        rig.cuda.advance(1e-6)
    return rig.cuda.now - start


def layer_ranges(rig: CopyRig, layer: int) -> Ranges:
    part = rig.kv.layout.part(layer, layer + 1)
    blocks = np.array(BLOCKS, np.uint64)
    return Ranges(part.addresses + blocks * part.steps, np.repeat(part.sizes, len(blocks)))


def test_layers_come_in_beside_compute_and_the_offload_runs_behind_it() -> None:
    rig = rig_of("packed LBHNC")
    tickets: list[CopyTicket] = []
    seconds = run_forward(rig, tickets, is_synchronous=False)
    compute = LAYER_COUNT * LAYER_SECONDS
    busy = max(
        rig.cuda.timeline.busy_seconds(engine)
        for engine in (Engine.HOST_TO_DEVICE, Engine.DEVICE_TO_HOST)
    )
    assert [ticket.failed for ticket in tickets] == [None] * (LAYER_COUNT + 1)
    assert seconds < 1.15 * max(compute, busy)
    assert rig.cuda.synchronize_count == 0
    rig.cuda.checker.assert_no_races()


def test_a_step_that_waits_for_each_layer_is_not_overlapped() -> None:
    """What the test before must be able to tell."""
    rig = rig_of("packed LBHNC")
    seconds = run_forward(rig, [], is_synchronous=True)
    assert seconds > 1.15 * LAYER_COUNT * LAYER_SECONDS
