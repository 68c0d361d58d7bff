"""Compares what copies of an engine on a fake GPU moved with what they were to move."""

from __future__ import annotations

import numpy as np

from kvtier.connector.jobs import Job, JobResult, OffloadJob, StepPlan
from kvtier.memory import Bytes
from tests.support.fake_gpu import FakeGpu


class CopyWatch:
    """`slots` is [slot, byte]: the memory of the daemon."""

    def __init__(self, gpu: FakeGpu, slots: Bytes) -> None:
        self._gpu = gpu
        self._slots = slots
        self._jobs: dict[int, Job] = {}
        self._computed: dict[tuple[int, int], Bytes] = {}  # By job and device block.

    def note_start(self, plan: StepPlan) -> None:
        """What the engine has launched by now is what is to be copied out."""
        for onboard in plan.onboards:
            self._jobs[onboard.job_id] = onboard
        for offload in plan.offloads:
            self._jobs[offload.job_id] = offload
            for block in offload.device_blocks:
                self._look(offload.job_id, block)

    def differing(self, result: JobResult) -> list[int]:
        """Device blocks of a copy that has ended well, whose bytes are not those of their slots."""
        job = self._jobs.pop(result.job_id)
        wrong = []
        for block, slot in zip(job.device_blocks, job.slots, strict=True):
            is_out = isinstance(job, OffloadJob)
            held = self._computed.pop((job.job_id, block)) if is_out else self._gpu.bytes_of(block)
            if result.failed is None and not np.array_equal(held, self._slots[slot]):
                wrong.append(block)
        return wrong

    def _look(self, job_id: int, block: int) -> None:
        self._computed[job_id, block] = np.empty(0, np.uint8)

        def see(found: Bytes) -> None:
            if (job_id, block) in self._computed:
                self._computed[job_id, block] = found

        self._gpu.look_at(block, see)
