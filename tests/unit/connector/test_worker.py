"""The worker side: its checks around a copy, its thread, and being quiet."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from kvtier.connector.copy_lane import ThreadLane
from kvtier.connector.jobs import FailReason, JobResult, OffloadJob, OnboardJob, StepPlan
from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.worker import WorkerConnector
from tests.support.clock import ManualClock
from tests.support.connector_rig import (
    SHARD_BYTES,
    Bytes,
    DeviceCopier,
    content_of,
    numbered_chain,
    spec_of,
)
from tests.support.fake_client import FakeClient, FakeSession
from tests.support.stepped_control import SteppedLane

SESSION = FakeSession(1, 1)


class GatedCopier(DeviceCopier):
    """Waits in every copy until the gate opens; tells when it is inside."""

    def __init__(self) -> None:
        super().__init__(32)
        self.is_inside = threading.Event()
        self.gate = threading.Event()
        self.copied = threading.Semaphore(0)
        self.order: list[str] = []

    def copy_out(self, device_blocks: Sequence[int], views: Sequence[Bytes]) -> None:
        self.order.append(f"out {device_blocks[0]}")
        self.is_inside.set()
        assert self.gate.wait(10)
        super().copy_out(device_blocks, views)
        self.copied.release()

    def copy_in(self, device_blocks: Sequence[int], views: Sequence[Bytes]) -> None:
        self.order.append(f"in {device_blocks[0]}")
        super().copy_in(device_blocks, views)


def onboard(job_id: int, slots: Sequence[int], first: int, deadline_ns: int) -> OnboardJob:
    blocks = tuple(range(first, first + len(slots)))
    return OnboardJob(job_id, "r", SESSION, tuple(slots), blocks, deadline_ns)


def offload(job_id: int, slots: Sequence[int], first: int = 0) -> OffloadJob:
    blocks = tuple(range(first, first + len(slots)))
    return OffloadJob(job_id, "r", SESSION, tuple(slots), blocks)


def plan_of(*jobs: OnboardJob | OffloadJob) -> StepPlan:
    onboards = tuple(job for job in jobs if isinstance(job, OnboardJob))
    offloads = tuple(job for job in jobs if isinstance(job, OffloadJob))
    return StepPlan(spec_of(), onboards, offloads)


class Bench:
    """A worker whose lane a test steps."""

    def __init__(self, settings: ConnectorSettings | None = None) -> None:
        self.clock = ManualClock()
        self.client = FakeClient(self.clock, shard_bytes=SHARD_BYTES)
        self.copier = DeviceCopier(32)
        self.lane = SteppedLane()
        self.worker = WorkerConnector(
            self.client,
            spec_of(),
            self.copier,
            settings=settings,
            clock=self.clock,
            lane=self.lane,
        )

    def deadline_ns(self, seconds: float) -> int:
        return self.clock.now_ns() + int(seconds * 1e9)

    def run(self, *jobs: OnboardJob | OffloadJob) -> list[JobResult]:
        self.worker.start(plan_of(*jobs))
        self.lane.step()
        return self.worker.poll()


def test_bytes_go_out_and_come_back() -> None:
    bench = Bench()
    bench.copier.blocks[0] = 7
    assert bench.run(offload(1, [5]))[0].failed is None
    assert (bench.client.memory[0][5] == 7).all()
    result = bench.run(onboard(2, [5], 9, bench.deadline_ns(1)))[0]
    assert (result.failed, result.bytes_count) == (None, SHARD_BYTES)
    assert (bench.copier.blocks[9] == 7).all()


def test_load_that_ends_after_the_deadline_is_reported_as_failed() -> None:
    bench = Bench()

    class SlowCopier(DeviceCopier):
        def copy_in(self, device_blocks: Sequence[int], views: Sequence[Bytes]) -> None:
            bench.clock.advance(2)

    worker = WorkerConnector(
        bench.client, spec_of(), SlowCopier(32), clock=bench.clock, lane=bench.lane
    )
    worker.start(plan_of(onboard(1, [1], 1, bench.deadline_ns(1))))
    bench.lane.step()
    assert [r.failed for r in worker.poll()] == [FailReason.DEADLINE]


def test_stale_generation_is_refused_without_a_copy() -> None:
    bench = Bench()
    bench.client.reconnect(restarted=True)
    results = bench.run(offload(1, [5]), onboard(2, [5], 9, bench.deadline_ns(1)))
    assert {r.failed for r in results} == {FailReason.STALE}
    assert bench.copier.copied_out == []


def test_failing_copier_fails_its_job_alone() -> None:
    bench = Bench()
    bench.copier.failures = 1
    results = bench.run(offload(1, [1]), offload(2, [2]))
    assert [r.failed for r in results] == [FailReason.COPY, None]
    assert "on fire" in results[0].message


def test_onboard_goes_between_two_slices_of_an_offload() -> None:
    copier = GatedCopier()
    clock = ManualClock()
    client = FakeClient(clock, shard_bytes=SHARD_BYTES)
    settings = ConnectorSettings(offload_slice_blocks=2)
    lane = ThreadLane()
    worker = WorkerConnector(client, spec_of(), copier, settings=settings, clock=clock, lane=lane)
    worker.start(plan_of(offload(1, [1, 2, 3, 4], 10)))
    assert copier.is_inside.wait(10)
    worker.start(plan_of(offload(3, [7], 20), onboard(2, [6], 5, clock.now_ns() + 10**9)))
    copier.gate.set()
    for _ in range(3):
        assert copier.copied.acquire(timeout=10)
    worker.close()
    assert copier.order == ["out 10", "in 5", "out 12", "out 20"]


def test_thread_survives_a_failing_copy_and_reports_each_job_once() -> None:
    copier = DeviceCopier(32)
    copier.failures = 1
    clock = ManualClock()
    client = FakeClient(clock, shard_bytes=SHARD_BYTES)
    ended = threading.Semaphore(0)
    lane = ThreadLane()
    worker = WorkerConnector(client, spec_of(), copier, clock=clock, lane=lane)

    class Telling(DeviceCopier):
        def copy_out(self, device_blocks: Sequence[int], views: Sequence[Bytes]) -> None:
            ended.release()

    worker.start(plan_of(offload(1, [1])))
    second = WorkerConnector(client, spec_of(), Telling(32), clock=clock, lane=lane)
    second.start(plan_of(offload(2, [2])))
    assert ended.acquire(timeout=10)
    worker.close()
    assert sorted((r.job_id, r.failed) for r in worker.poll()) == [(1, FailReason.COPY), (2, None)]
    assert worker.poll() == []


def test_quiet_waits_for_the_copy_under_way_and_refuses_what_comes_later() -> None:
    copier = GatedCopier()
    clock = ManualClock()
    client = FakeClient(clock, shard_bytes=SHARD_BYTES)
    settings = ConnectorSettings(offload_slice_blocks=1)
    worker = WorkerConnector(client, spec_of(), copier, settings=settings, clock=clock)
    worker.start(plan_of(offload(1, [1, 2])))
    assert copier.is_inside.wait(10)
    client.refused.add(SESSION)
    quiet = threading.Thread(target=client.quiet)
    quiet.start()
    quiet.join(0.05)
    assert quiet.is_alive(), "quiet was declared while a copy ran"
    copier.gate.set()
    quiet.join(10)
    assert not quiet.is_alive()
    later = OffloadJob(3, "r", FakeSession(1, 2), (4,), (9,))
    worker.start(plan_of(offload(2, [3]), later))
    for _ in range(2):
        assert copier.copied.acquire(timeout=10)
    worker.close()
    failed = {r.job_id: r.failed for r in worker.poll()}
    assert failed == {1: FailReason.STALE, 2: FailReason.STALE, 3: None}
    assert copier.order == ["out 0", "out 9"]


def test_closed_worker_reports_what_it_did_not_do() -> None:
    bench = Bench()
    bench.worker.start(plan_of(offload(1, [1])))
    bench.worker.close()
    assert [r.failed for r in bench.worker.poll()] == [FailReason.CLOSED]


def test_closed_thread_reports_jobs_that_come_later() -> None:
    clock = ManualClock()
    client = FakeClient(clock, shard_bytes=SHARD_BYTES)
    worker = WorkerConnector(client, spec_of(), DeviceCopier(32), clock=clock)
    worker.close()
    worker.start(plan_of(offload(1, [1])))
    assert [r.failed for r in worker.poll()] == [FailReason.CLOSED]


def test_sampled_verification_finds_a_scribbled_block() -> None:
    bench = Bench(ConnectorSettings(verify_one_in=1))
    chain = numbered_chain(3)
    for index, block_hash in enumerate(chain):
        bench.copier.blocks[index] = content_of(block_hash)
    out = OffloadJob(1, "r", SESSION, (4, 5, 6), (0, 1, 2), tuple(chain))
    assert bench.run(out)[0].failed is None
    bench.client.memory[0][5][3] ^= 1
    load = OnboardJob(2, "r", SESSION, (4, 5, 6), (10, 11, 12), bench.deadline_ns(1), tuple(chain))
    result = bench.run(load)[0]
    assert (result.failed, result.failed_index) == (FailReason.CORRUPT, 1)
    assert not bench.copier.blocks[10:13].any()


def test_plan_of_another_namespace_uses_its_arena() -> None:
    bench = Bench()
    other = spec_of("v2")
    bench.worker.start(StepPlan(other, (), (offload(1, [1]),)))
    bench.lane.step()
    assert bench.worker.poll()[0].failed is None
    assert other.fingerprint() in bench.client.namespaces


@pytest.mark.parametrize("job", [offload(1, [1, 2]), onboard(1, [1], 2, 5)])
def test_plans_travel_to_other_processes(job: OnboardJob | OffloadJob) -> None:
    plan = plan_of(job)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert np.array(job.slots).dtype.kind == "i"
