"""The worker side of `memory_connector` for engines on a fake GPU: kvtier's own streams and lane.

Copies begin at once and end at any time until a test's polls say that they must have. What was
copied out must be what the engine had computed when it asked; what was copied in, what was
resident.
"""

from __future__ import annotations

import random

from kvtier.connector.jobs import FailReason, Job, JobResult, OnboardJob, StepPlan
from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.stream_lane import StreamLane
from kvtier.connector.worker import WorkerConnector
from kvtier.namespace import NamespaceSpec
from tests.support.clock import ManualClock
from tests.support.copy_watch import CopyWatch
from tests.support.fake_client import FakeClient
from tests.support.fake_gpu import FakeGpu
from tests.support.memory_connector import BAD_SLOT, SLOT_COUNT, MemoryScheduler
from tests.support.pinned import HostSlab

LOOK_SECONDS = 20e-6


class DeviceMemoryWorker:
    """A WorkerSide."""

    def __init__(self, scheduler: MemoryScheduler, spec: NamespaceSpec, gpu: FakeGpu) -> None:
        self._scheduler = scheduler
        self._blocks = blocks = scheduler.blocks
        self._gpu = gpu
        clock = ManualClock()
        self._client = FakeClient(clock, slot_count=SLOT_COUNT, shard_bytes=spec.shard_bytes)
        if blocks.slab is None:
            blocks.slab = HostSlab(SLOT_COUNT * spec.shard_bytes)
        memory = blocks.slab.array[: SLOT_COUNT * spec.shard_bytes]
        self._client.memory = memory.reshape(1, SLOT_COUNT, spec.shard_bytes)
        self._client.memory[0][BAD_SLOT] = 0x42
        # A machine's time is its own: nothing to learn from.
        device_blocks = gpu.make_blocks(ConnectorSettings(offload_stretch_max=0.0))
        self._lane = StreamLane(device_blocks.streams, threaded=False)
        self._worker = WorkerConnector(
            self._client, spec, device_blocks, clock=clock, lane=self._lane
        )
        self._random = random.Random(gpu.seed)
        self._poll_count = 0
        self._flying: dict[int, tuple[int, Job]] = {}  # With the last poll.
        self._ended: dict[int, JobResult] = {}
        self._watch = CopyWatch(gpu, self._client.memory[0])

    def note_step(self, token_count: int) -> None:
        self._blocks.step_tokens.append(token_count)
        self._worker.note_step(token_count)

    def follow_layer(self, layer: int) -> None:
        self._worker.follow_layer(layer)

    def start(self, plan: StepPlan) -> None:
        ends_at = self._poll_count + self._blocks.copy_polls
        jobs: list[Job] = [*plan.onboards, *plan.offloads]
        for job in jobs:
            self._flying[job.job_id] = ends_at, job
        self._watch.note_start(plan)
        self._worker.start(plan)

    def poll(self) -> list[JobResult]:
        self._poll_count += 1
        if self._random.random() < 0.5:
            self._step()
        due = [job for ends_at, job in self._flying.values() if ends_at <= self._poll_count]
        for _ in range(100_000):
            if all(job.job_id in self._ended for job in due):
                break
            self._step()
        return [self._end(job) for job in due]

    def close(self) -> None:
        self._worker.close()
        assert self._client.open_hold_count == 0
        assert self._client.pins is not None
        assert self._client.pins.give_up(int(self._client.memory.ctypes.data))

    def _step(self) -> None:
        self._lane.step()
        self._gpu.cuda.advance(LOOK_SECONDS)
        for result in self._worker.poll():
            self._ended[result.job_id] = result

    def _end(self, job: Job) -> JobResult:
        result = self._ended.pop(job.job_id)
        assert result.failed is None, result
        del self._flying[job.job_id]
        hashes = self._scheduler.hashes_of_job[job.job_id]
        differing = self._watch.differing(result)
        if isinstance(job, OnboardJob):
            if self._blocks.fails_onboards:
                return JobResult(job.job_id, 0, FailReason.COPY)
            assert not differing, "other bytes came in"
            self._blocks.onboarded_count += len(hashes)
            return result
        for block_hash, block, slot in zip(hashes, job.device_blocks, job.slots, strict=True):
            if block in differing:
                self._blocks.overwritten.append(block_hash)
            self._blocks.resident[block_hash] = self._client.memory[0][slot]
        return result
