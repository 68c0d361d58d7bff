"""Races that other KV caches have shipped: the checker finds each, and passes the mended order.

Every scene takes `is_mended`. The bytes are looked at as well: over many seeds the planted race
must also be able to go wrong, or the fake would be too tame to trust.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvtier.cuda.fake import FakeCudart
from kvtier.cuda.race_checker import DataRace
from kvtier.cuda.runtime import (
    LEGACY_STREAM,
    Addresses,
    Direction,
    Event,
    Ranges,
    SourceOrder,
    Stream,
)
from kvtier.memory import Bytes
from tests.support.pinned import HostSlab

BYTES = 8192
OLD, NEW = 1, 2


def column(value: int) -> Addresses:
    return np.array([value], np.uint64)


class Scene:
    """One device block, one slot, the engine's stream and ours."""

    def __init__(self, seed: int | None = None) -> None:
        self.cuda = FakeCudart(seed=seed)
        self.slab = HostSlab(BYTES)
        self.slot = self.slab.address
        self.cuda.register_host(self.slot, self.slab.length_bytes)
        self.block = self.cuda.allocate_device(BYTES)
        self.compute = self.cuda.create_stream(0)
        self.copies = self.cuda.create_stream(0)
        self.results: list[int] = []  # What the engine's kernels have read.

    @property
    def block_bytes(self) -> Bytes:
        return self.cuda.device_bytes(self.block, BYTES)

    def fill(self, value: int, stream: Stream | None = None) -> None:
        """A kernel of the engine's writes KV into the block."""
        self.cuda.compute(
            self.compute if stream is None else stream,
            20e-6,
            writes=Ranges.of((self.block, BYTES)),
            effect=lambda: self.block_bytes.fill(value),
            name="attention writes",
        )

    def attend(self) -> None:
        """A kernel of the engine's reads the block."""
        self.cuda.compute(
            self.compute,
            20e-6,
            reads=Ranges.of((self.block, BYTES)),
            effect=lambda: self.results.extend(set(self.block_bytes.tolist())),
            name="attention reads",
        )

    def offload(self, order: SourceOrder = SourceOrder.STREAM) -> None:
        self.cuda.copy_batch(
            column(self.slot), column(self.block), column(BYTES), order, self.copies
        )

    def onboard(self) -> None:
        self.cuda.copy(self.block, self.slot, BYTES, Direction.HOST_TO_DEVICE, self.copies)

    def follow(self, stream: Stream, other: Stream) -> None:
        self.cuda.wait_event(stream, self.record(other))

    def record(self, stream: Stream) -> Event:
        event = self.cuda.create_event()
        self.cuda.record_event(event, stream)
        return event

    def read_slot(self) -> None:
        """Another engine reads what was committed."""
        self.cuda.host_reads((self.slot, BYTES))
        self.results.extend(set(self.slab.array[:BYTES].tolist()))

    def poll(self, event: Event) -> None:
        while not self.cuda.is_event_done(event):
            self.cuda.advance(1e-6)

    def end(self) -> None:
        for stream in (self.compute, self.copies, LEGACY_STREAM):
            self.cuda.synchronize_stream(stream)


def store_without_waiting(scene: Scene, is_mended: bool) -> int:
    """vllm#46278: an offload that does not wait for the kernel which writes the block."""
    scene.fill(NEW)
    if is_mended:
        scene.follow(scene.copies, scene.compute)
    scene.offload()
    scene.end()
    scene.read_slot()
    return NEW


def store_after_the_legacy_stream(scene: Scene, is_mended: bool) -> int:
    """An engine that computes on the default stream: ours do not follow it by themselves."""
    scene.fill(NEW, LEGACY_STREAM)
    if is_mended:
        scene.follow(scene.copies, LEGACY_STREAM)
    scene.offload()
    scene.end()
    scene.read_slot()
    return NEW


def store_of_any_order(scene: Scene, is_mended: bool) -> int:
    """vllm#45704: the wait is there, and the batch may read its source before it all the same."""
    scene.fill(NEW)
    scene.follow(scene.copies, scene.compute)
    scene.offload(SourceOrder.STREAM if is_mended else SourceOrder.ANY)
    scene.end()
    scene.read_slot()
    return NEW


def load_over_a_live_read(scene: Scene, is_mended: bool) -> int:
    """vllm#47291: an onboard into a block that an earlier request's kernel still reads."""
    scene.fill(OLD)
    scene.end()
    scene.slab.array.fill(NEW)
    scene.attend()
    if is_mended:
        scene.follow(scene.copies, scene.compute)
    scene.onboard()
    scene.end()
    return OLD


def load_over_zeroing(scene: Scene, is_mended: bool) -> int:
    """1Cat-vLLM#598: an onboard into a block that is still being zeroed."""
    scene.slab.array.fill(NEW)
    scene.fill(0)
    if is_mended:
        scene.follow(scene.copies, scene.compute)
    scene.onboard()
    scene.end()
    scene.attend()
    scene.end()
    return NEW


def reuse_before_the_store_ends(scene: Scene, is_mended: bool) -> int:
    """sglang#20611: the next step writes into a block that is still being offloaded."""
    scene.fill(OLD)
    scene.follow(scene.copies, scene.compute)
    scene.offload()
    if is_mended:
        scene.follow(scene.compute, scene.copies)
    scene.fill(NEW)
    scene.end()
    scene.read_slot()
    return OLD


def use_before_the_load_ends(scene: Scene, is_mended: bool) -> int:
    """The other direction of sglang#20611: attention over a block that is still coming in."""
    scene.slab.array.fill(NEW)
    scene.fill(OLD)
    scene.follow(scene.copies, scene.compute)
    scene.onboard()
    if is_mended:
        scene.follow(scene.compute, scene.copies)
    scene.attend()
    scene.end()
    return NEW


def commit_before_the_event(scene: Scene, is_mended: bool) -> int:
    """A slot that others read as soon as its copy was queued."""
    scene.fill(NEW)
    scene.follow(scene.copies, scene.compute)
    scene.offload()
    if is_mended:
        scene.poll(scene.record(scene.copies))
    scene.read_slot()
    scene.end()
    return NEW


def record_too_early(scene: Scene, is_mended: bool) -> int:
    """An event waits for what was there when it was recorded, not for what came later."""
    event = scene.record(scene.compute)
    scene.fill(NEW)
    if is_mended:
        scene.cuda.record_event(event, scene.compute)
    scene.cuda.wait_event(scene.copies, event)
    scene.offload()
    scene.end()
    scene.read_slot()
    return NEW


def unregister_in_mid_copy(scene: Scene, is_mended: bool) -> int:
    """A slab that is given up while a copy touches it."""
    scene.fill(NEW)
    scene.follow(scene.copies, scene.compute)
    scene.offload()
    if is_mended:
        scene.poll(scene.record(scene.copies))
    scene.cuda.unregister_host(scene.slot)
    scene.end()
    scene.read_slot()
    return NEW


SCENES = [
    store_without_waiting,
    store_after_the_legacy_stream,
    store_of_any_order,
    load_over_a_live_read,
    load_over_zeroing,
    reuse_before_the_store_ends,
    use_before_the_load_ends,
    commit_before_the_event,
    record_too_early,
    unregister_in_mid_copy,
]
Play = Callable[[Scene, bool], int]


@pytest.mark.parametrize("play", SCENES)
def test_a_shipped_race_is_found_in_the_first_run(play: Play) -> None:
    scene = Scene()
    with pytest.raises(DataRace):
        play(scene, False)
    assert len(scene.cuda.checker.races) == 1


@pytest.mark.slow
@pytest.mark.parametrize("play", SCENES)
def test_the_mended_order_is_clean_and_right_in_every_interleaving(play: Play) -> None:
    for seed in range(25):
        scene = Scene(seed)
        expected = play(scene, True)
        scene.cuda.checker.assert_no_races()
        assert set(scene.results) == {expected}, f"seed {seed}"


@pytest.mark.parametrize("play", [scene for scene in SCENES if scene is not unregister_in_mid_copy])
def test_an_unordered_run_can_end_in_wrong_bytes(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the checker blind: what it forbids must be able to do harm in the fake."""
    monkeypatch.setattr(
        "kvtier.cuda.race_checker.RaceChecker._found", lambda self, race: self.races.append(race)
    )
    for seed in range(60):
        scene = Scene(seed)
        expected = play(scene, False)
        assert scene.cuda.checker.races
        if set(scene.results) != {expected}:
            return
    raise AssertionError("60 seeds, and never a wrong byte: the fake does not interleave")
