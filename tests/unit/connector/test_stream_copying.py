"""Copies of blocks on a device, by a worker: their order, their ends, and what stays held."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvtier.connector.jobs import FailReason, JobResult, OffloadJob, OnboardJob, StepPlan
from kvtier.connector.stream_copying import DeviceBlocks
from kvtier.connector.stream_lane import StreamLane
from kvtier.connector.worker import WorkerConnector
from kvtier.cuda.errors import CudaCode, CudaRefused
from kvtier.cuda.fake import FakeCudart
from kvtier.cuda.runtime import Ranges
from kvtier.memory import Bytes
from tests.support.clock import ManualClock
from tests.support.connector_rig import spec_of
from tests.support.fake_client import FakeClient, FakeSession
from tests.support.kv_layouts import Sizes, one_storage
from tests.support.pinned import HostSlab

SESSION = FakeSession(1, 1)
SLOT_COUNT = 16
PAGE = 4096


class Bench:
    """A worker whose blocks are on a fake GPU, and an engine that computes on it."""

    def __init__(
        self,
        seed: int | None = None,
        *,
        threaded: bool = False,
        layer_count: int = 0,
        stretch_max: float = 0.0,
    ) -> None:
        self.cuda = FakeCudart(seed=seed)
        # Blocks of whole pages: 2 layers of keys and values.
        sizes = Sizes(layers=2, blocks=8, heads=4, tokens=16, width=64)
        self.kv = one_storage(self.cuda, sizes, "BL2HNC", by_layer=False)
        self.shard_bytes = self.kv.layout.shard_bytes
        self.slab = HostSlab(SLOT_COUNT * self.shard_bytes)
        self.clock = ManualClock()
        self.client = FakeClient(self.clock, slot_count=SLOT_COUNT, shard_bytes=self.shard_bytes)
        self.client.memory = self.slab.array.reshape(1, SLOT_COUNT, self.shard_bytes)
        self.compute = self.cuda.create_stream(0)
        self.blocks = DeviceBlocks(
            self.cuda,
            0,
            self.kv.layout,
            lambda: self.compute,
            layer_count=layer_count,
            clock=self.clock,
            offload_stretch_max=stretch_max,
        )
        self.lane = StreamLane(self.blocks.streams, threaded=threaded)
        self.spec = replace(spec_of(), shard_bytes=self.shard_bytes)
        self.worker = WorkerConnector(
            self.client, self.spec, self.blocks, clock=self.clock, lane=self.lane
        )

    def start(self, *jobs: OnboardJob | OffloadJob) -> None:
        onboards = tuple(job for job in jobs if isinstance(job, OnboardJob))
        offloads = tuple(job for job in jobs if isinstance(job, OffloadJob))
        self.worker.start(StepPlan(self.spec, onboards, offloads))

    def offload(self, job_id: int, slots: Sequence[int], blocks: Sequence[int]) -> OffloadJob:
        return OffloadJob(job_id, "r", SESSION, tuple(slots), tuple(blocks))

    def onboard(
        self, job_id: int, slots: Sequence[int], blocks: Sequence[int], seconds: float = 1.0
    ) -> OnboardJob:
        deadline_ns = self.clock.now_ns() + int(seconds * 1e9)
        return OnboardJob(job_id, "r", SESSION, tuple(slots), tuple(blocks), deadline_ns)

    def run(self) -> dict[int, JobResult]:
        """Until no copy is under way."""
        for _ in range(100_000):
            if not self.lane.step():
                break
            self.cuda.advance(5e-6)
        return {result.job_id: result for result in self.worker.poll()}

    def fill(self, block: int, value: int, seconds: float = 20e-6) -> None:
        """A kernel of the engine's writes one block."""

        def effect() -> None:
            for view in self.kv.views(block):
                view[...] = value

        self.cuda.compute(
            self.compute, seconds, writes=self.ranges_of(block), effect=effect, name="forward"
        )

    def read(self, block: int) -> list[int]:
        """A kernel of the engine's reads one block; what it saw, once it has run."""
        found: list[int] = []
        self.cuda.compute(
            self.compute,
            20e-6,
            reads=self.ranges_of(block),
            effect=lambda: found.extend(np.unique(self.kv.block_bytes(block)).tolist()),
            name="attention",
        )
        return found

    def ranges_of(self, block: int) -> Ranges:
        layout = self.kv.layout
        return Ranges(layout.addresses + layout.steps * np.uint64(block), layout.sizes)

    def slot(self, slot: int) -> Bytes:
        """What a slot holds, read by the host."""
        view: Bytes = self.client.memory[0][slot]
        self.cuda.host_reads((int(view.ctypes.data), view.nbytes))
        return view

    def close(self) -> None:
        self.worker.close()
        assert self.client.open_hold_count == 0
        assert self.client.pins is not None
        assert self.client.pins.give_up(self.slab.address)
        self.cuda.assert_clean()


@pytest.mark.parametrize("seed", [None, *range(20)])
def test_blocks_go_out_and_come_back_in_the_engine_s_order(seed: int | None) -> None:
    bench = Bench(seed)
    for value in (5, 9):
        bench.fill(0, value)
        bench.fill(1, value + 1)
        bench.start(bench.offload(value, [2, 7], [0, 1]))
        found = bench.run()
        assert found[value].failed is None
        assert found[value].bytes_count == 2 * bench.shard_bytes
        assert (bench.slot(2) == value).all()
        assert (bench.slot(7) == value + 1).all()
        bench.read(4)  # Under way still when the load is asked for.
        bench.start(bench.onboard(value + 100, [7, 2], [4, 5]))
        assert bench.run()[value + 100].failed is None
        seen = [bench.read(4), bench.read(5)]
        bench.cuda.synchronize_stream(bench.compute)
        assert seen == [[value + 1], [value]]
    bench.close()


@pytest.mark.parametrize("seed", range(40))
def test_fenced_blocks_are_overwritten_without_a_race(seed: int) -> None:
    """The fence comes before the first step of the copy, in its middle, or after its last one."""
    bench = Bench(seed)
    bench.fill(3, 77)
    bench.start(bench.offload(1, [4], [3]))
    for _ in range(seed % 4):
        bench.lane.step()
        bench.cuda.advance(2e-6)
    before = bench.cuda.synchronize_count
    bench.worker.withdraw([1])
    assert bench.cuda.synchronize_count == before, "the engine waited for the device"
    bench.fill(3, 99)
    result = bench.run()[1]
    assert result.failed in (None, FailReason.WITHDRAWN)
    if result.failed is None:
        assert (bench.slot(4) == 77).all()
    bench.cuda.synchronize_stream(bench.compute)
    bench.close()


def test_a_fence_before_the_first_step_lets_nothing_be_copied() -> None:
    bench = Bench()
    bench.fill(3, 77)
    bench.start(bench.offload(1, [4], [3]))
    bench.worker.withdraw([1])
    assert bench.run()[1].failed is FailReason.WITHDRAWN
    assert not bench.slot(4).any()
    bench.close()


def test_nobody_is_told_of_quiet_under_a_copy() -> None:
    bench = Bench()
    bench.fill(0, 1, seconds=1e-3)
    bench.start(bench.offload(1, [0], [0]))
    bench.lane.step()
    told = threading.Event()

    def quiet() -> None:
        bench.client.quiet()
        told.set()

    bench.client.refused.add(SESSION)
    thread = threading.Thread(target=quiet, daemon=True)
    thread.start()
    assert not told.wait(0.05)
    assert bench.client.open_hold_count == 1
    bench.run()
    assert told.wait(5)
    thread.join()
    bench.start(bench.offload(2, [1], [0]))
    assert bench.run()[2].failed is FailReason.STALE
    bench.close()


def test_load_that_ends_after_the_deadline_has_failed() -> None:
    bench = Bench()
    bench.fill(1, 1, seconds=1e-3)
    bench.start(bench.onboard(1, [0], [0]))
    bench.lane.step()
    bench.clock.advance(2.0)
    assert bench.run()[1].failed is FailReason.DEADLINE
    bench.start(bench.onboard(2, [0], [0], seconds=-1.0))
    assert bench.run()[2].failed is FailReason.DEADLINE
    bench.close()


def test_slab_is_pinned_until_the_last_copy_has_ended() -> None:
    bench = Bench()
    assert bench.client.pins is not None
    bench.fill(0, 1, seconds=1e-3)
    bench.start(bench.offload(1, [0], [0]))
    bench.lane.step()
    assert bench.cuda.memory.host.registrations
    assert not bench.client.pins.give_up(bench.slab.address)
    assert bench.run()[1].failed is None
    assert not bench.cuda.memory.host.registrations
    assert bench.client.pins.give_up(bench.slab.address)
    bench.start(bench.offload(2, [0], [0]))
    assert bench.run()[2].failed is FailReason.COPY
    bench.close()


def test_slots_stay_held_for_good_once_the_device_is_broken() -> None:
    bench = Bench()
    bench.fill(0, 1, seconds=1e-3)
    bench.start(bench.offload(1, [0], [0]))
    bench.lane.step()
    bench.cuda._broken = CudaCode.ILLEGAL_ADDRESS
    result = bench.run()[1]
    assert result.failed is FailReason.COPY
    assert "ILLEGAL_ADDRESS" in result.message
    assert bench.client.open_hold_count == 1
    assert bench.client.pins is not None
    assert not bench.client.pins.give_up(bench.slab.address)
    bench.start(bench.offload(2, [1], [1]))
    assert bench.run()[2].failed is FailReason.INTERNAL
    bench.worker.close()


def test_copies_end_by_themselves_in_the_lane_s_thread_and_at_its_close() -> None:
    bench = Bench(threaded=True)
    found: dict[int, JobResult] = {}
    bench.fill(0, 8)
    bench.start(bench.offload(1, [0], [0]))
    for _ in range(2_000):
        found.update({result.job_id: result for result in bench.worker.poll()})
        if found:
            break
        bench.cuda.advance(50e-6)
        time.sleep(0.001)
    assert found[1].failed is None
    assert (bench.slot(0) == 8).all()
    bench.start(bench.offload(2, [1], [0]))
    bench.worker.close()
    found.update({result.job_id: result for result in bench.worker.poll()})
    assert found[2].failed in (None, FailReason.CLOSED, FailReason.WITHDRAWN)
    bench.start(bench.offload(3, [1], [0]))
    assert [result.failed for result in bench.worker.poll()] == [FailReason.CLOSED]
    assert bench.client.open_hold_count == 0


def wait_results(bench: Bench, count: int) -> dict[int, JobResult]:
    found: dict[int, JobResult] = {}
    deadline = time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline:
        found.update({result.job_id: result for result in bench.worker.poll()})
        bench.cuda.advance(50e-6)
        time.sleep(0.001)
    return found


def test_failure_that_nobody_foresaw_ends_every_copy_and_leaves_no_engine_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And whoever asks for quiet is not told of it: the device may still write."""
    bench = Bench(threaded=True)
    bench.fill(0, 1, seconds=1e-3)

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(bench.blocks.streams, "poll", fail)
    bench.start(bench.offload(1, [0], [0]), bench.onboard(2, [1], [1]))
    found = wait_results(bench, 2)
    assert {result.failed for result in found.values()} == {FailReason.COPY}
    assert "ZeroDivisionError" in found[1].message
    assert bench.client.open_hold_count == 2
    monkeypatch.undo()
    bench.start(bench.onboard(3, [2], [2]))
    assert wait_results(bench, 1)[3].failed is FailReason.COPY
    bench.worker.close()


def test_failure_while_idle_does_not_end_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.connector.stream_lane.IDLE_SECONDS", 0.001)
    asked = threading.Event()

    def fail() -> None:
        asked.set()
        raise ZeroDivisionError("a bug")

    bench = Bench()
    lane = StreamLane(bench.blocks.streams, on_idle=fail)
    bench.worker._lane = lane
    assert asked.wait(5)
    bench.fill(0, 8)
    bench.start(bench.offload(1, [0], [0]))
    assert wait_results(bench, 1)[1].failed is None
    bench.close()


# ------------------------------------------------------------------------------------ by layers


def held_load(bench: Bench) -> OnboardJob:
    """A load by layers, behind a kernel that takes a while."""
    bench.fill(1, 1, seconds=1e-3)
    job = bench.onboard(1, [0], [1])
    bench.start(job)
    return job


def test_a_load_by_layers_is_begun_in_the_engine_s_thread() -> None:
    bench = Bench(layer_count=2)
    held_load(bench)
    assert bench.client.open_hold_count == 1
    for layer in range(2):
        bench.worker.follow_layer(layer)
    seen = bench.read(1)
    assert bench.run()[1].failed is None
    bench.cuda.synchronize_stream(bench.compute)
    assert seen == [0]
    bench.close()


def test_what_is_begun_keeps_its_slots_until_it_has_ended_when_the_lane_is_closed() -> None:
    bench = Bench(layer_count=2)
    held_load(bench)
    bench.worker.follow_layer(0)  # One layer is queued; the lane has not seen the load.
    close = bench.blocks.streams.close

    def check_and_close() -> None:
        assert bench.client.open_hold_count == 1
        close()

    bench.blocks.streams.close = check_and_close  # type: ignore[method-assign]
    bench.close()
    assert [result.failed for result in bench.worker.poll()] == [FailReason.WITHDRAWN]


def test_a_load_by_layers_that_cannot_begin_has_failed_at_once() -> None:
    bench = Bench(layer_count=2)
    bench.start(bench.onboard(1, [0], [0], seconds=-1.0))
    assert [result.failed for result in bench.worker.poll()] == [FailReason.DEADLINE]
    bench.worker.follow_layer(1)
    bench.close()


def test_a_layer_that_fails_calls_off_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(layer_count=2)

    def refuse(*_: object) -> None:
        raise CudaRefused("cuMemcpyBatchAsync", CudaCode.INVALID_VALUE)

    held_load(bench)
    monkeypatch.setattr(bench.blocks.streams._submitter, "submit", refuse)
    bench.worker.follow_layer(0)
    monkeypatch.undo()
    copied_bytes = bench.cuda.copies.copied_bytes
    assert bench.run()[1].failed is FailReason.COPY
    assert bench.cuda.copies.copied_bytes == copied_bytes
    bench.close()


def test_a_withdrawal_waits_for_its_own_job_s_step_beside_a_load_that_is_begun() -> None:
    bench = Bench(layer_count=2)
    store, load = bench.offload(1, [0], [0]), bench.onboard(2, [1], [1])
    bench.start(store)
    assert bench.worker.enter(store) is None  # The lane's thread,
    assert bench.worker.enter(load) is None  # and the engine's.
    bench.worker.leave(load)
    ended = threading.Event()

    def withdraw() -> None:
        bench.worker.withdraw([1])
        ended.set()

    thread = threading.Thread(target=withdraw, daemon=True)
    thread.start()
    assert not ended.wait(0.05)
    bench.worker.leave(store)
    assert ended.wait(5)
    thread.join()
    bench.run()
    bench.close()


def test_copies_held_for_the_engines_steps_go_on_when_it_has_none() -> None:
    """An engine goes on stepping until they have ended, and its empty steps count as none."""
    bench = Bench(stretch_max=0.05)
    bench.fill(0, 5)
    for _ in range(34):  # Never a step alone: so copies are held, to see one.
        bench.clock.advance(0.01)
        bench.blocks.streams.stored_bytes += 2 << 20
        bench.worker.note_step(8)
    bench.start(bench.offload(1, [2], [0]))
    for _ in range(100):
        bench.clock.advance(0.001)
        assert bench.lane.step()
        bench.cuda.advance(5e-6)
    for _ in range(10):
        bench.clock.advance(0.001)
        bench.worker.note_step(0)
        bench.lane.step()
    assert bench.run()[1].failed is None
    assert (bench.slot(2) == 5).all()
    bench.close()
