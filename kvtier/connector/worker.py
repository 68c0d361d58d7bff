"""The worker side: takes plans, copies on its lane, reports; one instance for each shard."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from kvtier.clock import Clock, SystemClock
from kvtier.connector.client_api import WorkerClient
from kvtier.connector.copy_lane import Copy, CopyLane, ThreadLane
from kvtier.connector.copying import BlockCopier, BlockMover, CopyProgress
from kvtier.connector.jobs import Job, JobResult, StepPlan
from kvtier.connector.settings import ConnectorSettings
from kvtier.namespace import NamespaceSpec


class WorkerConnector:
    """Moves what it is told to move, and nothing of a session that it was told to be quiet about.

    Invariant: once the quiet handler has returned for a session, no slot of it is touched again.
    """

    def __init__(
        self,
        client: WorkerClient,
        spec: NamespaceSpec,
        copier: BlockCopier,
        *,
        shard: int = 0,
        settings: ConnectorSettings | None = None,
        clock: Clock | None = None,
        lane: CopyLane | None = None,
    ) -> None:
        self._client = client
        self._copier = copier
        self._shard = shard
        self._settings = settings or ConnectorSettings()
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._open_counts: Counter[Any] = Counter()  # Jobs not ended, by session.
        # Refused for good: a plan under a lost session may come at any time. Grows by one a lost
        # session, and a session lasts at least one reconnect delay.
        self._refused: set[Any] = set()
        self._spec = spec
        self._mover = self._make_mover(spec)
        self._lane = lane or ThreadLane()
        client.add_quiet_handler(self._drain)

    def start(self, plan: StepPlan) -> None:
        """Queue the plan's copies, onboards first; returns at once."""
        if plan.spec != self._spec:
            self._spec = plan.spec
            self._mover = self._make_mover(plan.spec)
        jobs: list[Job] = [*plan.onboards, *plan.offloads]
        for job in jobs:
            with self._changed:
                self._open_counts[job.session] += 1
            progress = CopyProgress(job)
            self._lane.submit(Copy(progress, self._mover.steps(progress), self._end))

    def poll(self) -> list[JobResult]:
        """The jobs that have ended since the last poll."""
        return self._lane.poll()

    def close(self) -> None:
        """End the copy under way and fail the rest; the client stays open."""
        self._lane.close()

    def _make_mover(self, spec: NamespaceSpec) -> BlockMover:
        arena = self._client.arena(self._client.open_namespace(spec), self._shard)
        return BlockMover(arena, self._copier, self._settings, self._clock, self._is_refused)

    def _is_refused(self, job: Job) -> bool:
        return job.session in self._refused

    def _end(self, progress: CopyProgress) -> JobResult:
        """In the lane's thread: the job touches its slots no more."""
        session = progress.job.session
        with self._changed:
            self._open_counts[session] -= 1
            if self._open_counts[session] == 0:
                del self._open_counts[session]
                self._changed.notify_all()
        return progress.result(shard=self._shard, shard_bytes=self._spec.shard_bytes)

    def _drain(self, session: Any) -> None:
        """In a thread of the client's: refuse the session, wait for the copies under way.

        Without a deadline on purpose: saying Quiet too early would let another write into slots
        that we still touch; saying it late only keeps them from use.
        """
        self._refused.add(session)
        with self._changed:
            while self._open_counts[session]:
                self._changed.wait()
