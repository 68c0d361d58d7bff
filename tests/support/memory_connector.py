"""A connector without a daemon: blocks go to a dict; copies end when the test says so.

It does its worst within the contract: an onboard scribbles over its device blocks before the bytes
arrive, and a failed one leaves them scribbled; an offload reads its blocks only when it ends, so a
block that was given away meanwhile shows up as wrong bytes. On a fake GPU the copies are kvtier's
own (`device_worker`); the planning is the one below in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.connector.jobs import (
    FailReason,
    JobResult,
    OffloadJob,
    OnboardJob,
    StepOutcome,
    StepPlan,
)
from kvtier.engine.config import EngineConfig
from kvtier.engine.connector_api import EngineConnector, WorkerSide
from kvtier.engine.copier import HostBlockCopier
from kvtier.engine.engine import Engine
from kvtier.engine.kv_cache import namespace_spec
from kvtier.engine.model import LlamaModel
from kvtier.namespace import NamespaceSpec
from tests.support.engine_form import FakeGpuForm, current_form
from tests.support.fake_client import FakeSession
from tests.support.fake_gpu import FakeGpu
from tests.support.pinned import HostSlab

SESSION = FakeSession(1, 1)
SLOT_COUNT = 512
BAD_SLOT = 0  # What a failed onboard brings.


@dataclass
class MemoryBlocks:
    """What all engines of a test share, and how it behaves."""

    resident: dict[bytes, np.ndarray] = field(default_factory=dict)
    none_count: int = 0  # Questions answered "ask again" first.
    fails_onboards: bool = False
    copy_polls: int = 1  # Polls until a copy ends.
    onboarded_count: int = 0
    preempted_count: int = 0
    asked: list[tuple[str, int, int | None]] = field(default_factory=list)
    overwritten: list[bytes] = field(default_factory=list)  # Must stay empty.
    step_tokens: list[int] = field(default_factory=list)  # Of each step, as the worker is told.
    slots: dict[bytes, int] = field(default_factory=dict)
    slab: HostSlab | None = None  # Of engines on a fake GPU.

    def slot_of(self, block_hash: bytes) -> int:
        slot = self.slots.setdefault(block_hash, BAD_SLOT + 1 + len(self.slots))
        assert slot < SLOT_COUNT
        return slot


class MemoryScheduler:
    """The scheduler side: plans at once, believes the worker."""

    def __init__(self, blocks: MemoryBlocks, spec: NamespaceSpec) -> None:
        self.blocks = blocks
        self.hashes_of_job: dict[int, tuple[bytes, ...]] = {}
        self._spec = spec
        self._prompts: dict[str, tuple[bytes, ...]] = {}
        self._chains: dict[str, tuple[bytes, ...]] = {}
        self._local_counts: dict[str, int] = {}
        self._onboards: list[OnboardJob] = []
        self._offloads: list[OffloadJob] = []
        self._flights: dict[int, OnboardJob | OffloadJob] = {}
        self._offloading: set[bytes] = set()
        self._held: set[str] = set()

    @property
    def has_work(self) -> bool:
        return bool(self._flights)

    def on_new_request(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        tokens_of: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        self._prompts[request_id] = tuple(hashes)

    def get_onboard_count(self, request_id: str, local_block_count: int) -> int | None:
        count = self._count(request_id, local_block_count)
        self.blocks.asked.append((request_id, local_block_count, count))
        self._local_counts[request_id] = local_block_count
        return count

    def on_allocated(
        self, request_id: str, device_blocks: Sequence[int], onboard_count: int
    ) -> None:
        assert onboard_count == len(device_blocks) > 0
        first = self._local_counts[request_id]
        hashes = self._prompts[request_id][first : first + onboard_count]
        is_bad = self.blocks.fails_onboards
        slots = tuple(BAD_SLOT if is_bad else self.blocks.slot_of(name) for name in hashes)
        job = OnboardJob(
            self._job_id(), request_id, SESSION, slots, tuple(device_blocks), deadline_ns=1 << 62
        )
        self.hashes_of_job[job.job_id] = hashes
        self._flights[job.job_id] = job
        self._onboards.append(job)

    def on_blocks_full(
        self, request_id: str, hashes: Sequence[bytes], device_blocks: Sequence[int]
    ) -> None:
        assert len(hashes) == len(device_blocks)
        self._chains[request_id] = tuple(hashes)
        fresh = [
            (block_hash, device_block)
            for block_hash, device_block in zip(hashes, device_blocks, strict=True)
            if block_hash not in self.blocks.resident and block_hash not in self._offloading
        ]
        if not fresh:
            return
        slots = tuple(self.blocks.slot_of(block_hash) for block_hash, _ in fresh)
        device_blocks = [block for _, block in fresh]
        job = OffloadJob(self._job_id(), request_id, SESSION, slots, tuple(device_blocks))
        self.hashes_of_job[job.job_id] = tuple(block_hash for block_hash, _ in fresh)
        self._offloading.update(self.hashes_of_job[job.job_id])
        self._flights[job.job_id] = job
        self._offloads.append(job)

    def note_prefill(self, token_seconds: float) -> None:
        """Nobody asks here."""

    def build_plan(self) -> StepPlan:
        plan = StepPlan(self._spec, tuple(self._onboards), tuple(self._offloads))
        self._onboards, self._offloads = [], []
        return plan

    def on_results(self, results: Sequence[JobResult]) -> StepOutcome:
        onboarded, failed, released = [], [], []
        for result in results:
            job = self._flights.pop(result.job_id)
            request_id = job.request_id
            if isinstance(job, OnboardJob) and request_id not in self._held:
                (failed if result.failed else onboarded).append(request_id)
            if request_id in self._held and not self._is_flying(request_id):
                self._held.remove(request_id)
                released.append(request_id)
        return StepOutcome(tuple(onboarded), tuple(failed), tuple(released))

    def request_finished(self, request_id: str) -> bool:
        self._prompts.pop(request_id)
        return self._hold(request_id)

    def on_preempted(self, request_id: str) -> bool:
        self.blocks.preempted_count += 1
        if len(chain := self._chains.get(request_id, ())) > len(self._prompts[request_id]):
            self._prompts[request_id] = chain
        return self._hold(request_id)

    def on_device_blocks_short(self, block_count: int) -> None:
        """Nothing to let go of: it plans at once, so what it holds is being copied."""

    def _hold(self, request_id: str) -> bool:
        if self._is_flying(request_id):
            self._held.add(request_id)
        return request_id in self._held

    def _count(self, request_id: str, local_block_count: int) -> int | None:
        if self.blocks.none_count > 0:
            self.blocks.none_count -= 1
            return None
        count = 0
        for block_hash in self._prompts[request_id][local_block_count:]:
            if block_hash not in self.blocks.resident:
                break
            count += 1
        return count

    def _is_flying(self, request_id: str) -> bool:
        return any(job.request_id == request_id for job in self._flights.values())

    def _job_id(self) -> int:
        return len(self.hashes_of_job)


class MemoryWorker:
    """The worker side: each copy ends after `copy_polls` polls."""

    def __init__(
        self, blocks: MemoryBlocks, scheduler: MemoryScheduler, copier: HostBlockCopier
    ) -> None:
        self._blocks = blocks
        self._scheduler = scheduler
        self._copier = copier
        self._flying: list[tuple[int, OnboardJob | OffloadJob, list[np.ndarray]]] = []
        self._poll_count = 0

    def note_step(self, token_count: int) -> None:
        self._blocks.step_tokens.append(token_count)

    def follow_layer(self, layer: int) -> None:
        raise AssertionError("loads do not go by layers here")

    def start(self, plan: StepPlan) -> None:
        ends_at = self._poll_count + self._blocks.copy_polls
        for job in plan.onboards:
            scribble = [np.full(self._copier.block_bytes, 0x42, np.uint8)] * len(job.device_blocks)
            self._copier.copy_in(job.device_blocks, scribble)
            self._flying.append((ends_at, job, []))
        for job in plan.offloads:
            self._flying.append((ends_at, job, self._read(job)))

    def poll(self) -> list[JobResult]:
        self._poll_count += 1
        ended = [entry for entry in self._flying if entry[0] <= self._poll_count]
        self._flying = [entry for entry in self._flying if entry[0] > self._poll_count]
        return [self._end(job, as_started) for _, job, as_started in ended]

    def _end(self, job: OnboardJob | OffloadJob, as_started: list[np.ndarray]) -> JobResult:
        hashes = self._scheduler.hashes_of_job[job.job_id]
        if isinstance(job, OnboardJob):
            if self._blocks.fails_onboards:
                return JobResult(job.job_id, 0, FailReason.COPY)
            self._copier.copy_in(job.device_blocks, [self._blocks.resident[h] for h in hashes])
            self._blocks.onboarded_count += len(hashes)
        else:
            for block_hash, before, now in zip(hashes, as_started, self._read(job), strict=True):
                if not np.array_equal(before, now):
                    self._blocks.overwritten.append(block_hash)
                self._blocks.resident[block_hash] = now
        return JobResult(job.job_id, 0, None)

    def _read(self, job: OffloadJob) -> list[np.ndarray]:
        views = [np.empty(self._copier.block_bytes, np.uint8) for _ in job.device_blocks]
        self._copier.copy_out(job.device_blocks, views)
        return views


def connected_engine(model: LlamaModel, config: EngineConfig, blocks: MemoryBlocks) -> Engine:
    """An engine over `blocks`; several of them share what is resident."""
    form, spec = current_form(), namespace_spec(model, config)
    config = form.config_of(config)
    scheduler, device = MemoryScheduler(blocks, spec), form.make_device(model, config)
    worker: WorkerSide
    if isinstance(form, FakeGpuForm):
        from tests.support.device_worker import DeviceMemoryWorker

        assert isinstance(device, FakeGpu)
        worker = DeviceMemoryWorker(scheduler, spec, device)
        form.workers.append(worker)
    else:
        worker = MemoryWorker(blocks, scheduler, HostBlockCopier(device.kv_cache))
    connector = EngineConnector(scheduler, worker)
    return Engine(model, config, connector, device=device, pause=lambda _: None)
