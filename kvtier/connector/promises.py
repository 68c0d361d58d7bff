"""What the engine waits for; kept apart from the planning, to be kept when the planning has failed.

Written down from what crosses the border alone: plans handed out, results handed in, and what the
engine was told. So it is right whatever state the planning is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.connector.jobs import Job, JobResult, OnboardJob, StepOutcome, StepPlan


@dataclass(slots=True)
class _OpenJob:
    request_id: str
    is_onboard: bool
    workers: set[tuple[int, int]] = field(default_factory=set)  # Those that have reported.


class Promises:
    """Requests that wait for a verdict or for `released`, and the jobs that workers know of."""

    def __init__(self, *, worker_count: int) -> None:
        self._worker_count = worker_count
        self._loading: dict[str, None] = {}  # Must not run before onboarded or failed.
        self._held: dict[str, None] = {}  # Their device blocks are kept until released.
        self._jobs: dict[int, _OpenJob] = {}

    @property
    def is_owing(self) -> bool:
        return bool(self._loading or self._held)

    # --------------------------------------------------------------------- while the planning works

    def allocated(self, request_id: str, onboard_count: int) -> None:
        if onboard_count > 0:
            self._loading[request_id] = None

    def planned(self, plan: StepPlan) -> None:
        jobs: list[Job] = [*plan.onboards, *plan.offloads]
        for job in jobs:
            self._jobs[job.job_id] = _OpenJob(job.request_id, isinstance(job, OnboardJob))

    def reported(self, results: Sequence[JobResult]) -> None:
        for result in results:
            job = self._jobs.get(result.job_id)
            if job is None:
                continue
            job.workers.add(result.worker)
            if len(job.workers) >= self._worker_count:
                del self._jobs[result.job_id]

    def told(self, outcome: StepOutcome) -> None:
        for request_id in (*outcome.onboarded, *outcome.failed):
            self._loading.pop(request_id, None)
        for request_id in outcome.released:
            self._held.pop(request_id, None)

    def ended(self, request_id: str, *, is_held: bool) -> bool:
        """The request is finished or preempted; `is_held` is what the engine is told."""
        self._loading.pop(request_id, None)
        if is_held:
            self._held[request_id] = None
        return is_held

    # --------------------------------------------------------------------- when it has failed

    def end(self, request_id: str, *, onboards_only: bool = False) -> bool:
        """The request is finished or preempted: whether its device blocks must be kept."""
        is_touched = request_id in self._touched(onboards_only=onboards_only)
        return self.ended(request_id, is_held=is_touched or request_id in self._held)

    def settle(self) -> StepOutcome:
        """Everything that can be told now: onboards fail, but never while a worker writes."""
        outcome = self._outcome()
        self.told(outcome)
        return outcome

    @property
    def has_outcome(self) -> bool:
        """Whether `settle` would tell something."""
        return self._outcome() != StepOutcome()

    def _outcome(self) -> StepOutcome:
        writing, touching = self._touched(onboards_only=True), self._touched()
        failed = tuple(name for name in self._loading if name not in writing)
        released = tuple(name for name in self._held if name not in touching)
        return StepOutcome((), failed, released)

    def _touched(self, *, onboards_only: bool = False) -> set[str]:
        jobs = self._jobs.values()
        return {job.request_id for job in jobs if job.is_onboard or not onboards_only}
