"""The worker side: takes plans, copies on its lane, reports; one instance for each rank."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from kvtier.client.arena import SlabPins
from kvtier.clock import Clock, SystemClock
from kvtier.connector.client_api import ArenaLike, WorkerClient
from kvtier.connector.copy_lane import Copy, CopyLane, ThreadLane
from kvtier.connector.copying import BlockCopier, BlockMover, CopyProgress, Gate, Mover
from kvtier.connector.jobs import FailReason, Job, JobResult, OffloadJob, StepPlan
from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.sharding import Place
from kvtier.connector.stream_copying import DeviceBlocks
from kvtier.namespace import NamespaceSpec

log = logging.getLogger(__name__)


class Blocks(Protocol):
    """Where an engine's device blocks are, and all that depends on it."""

    @property
    def pins(self) -> SlabPins | None:
        """Who must know of slabs."""
        ...

    def make_lane(self) -> CopyLane: ...

    def make_mover(
        self, arena: ArenaLike, settings: ConnectorSettings, clock: Clock, gate: Gate
    ) -> Mover: ...

    def fence(self, job_ids: Sequence[int]) -> None:
        """In the engine's thread: what it does from now on comes after these jobs, of which no step
        is under way and none begins any more."""
        ...

    def follow_layer(self, layer: int) -> None:
        """In the engine's thread: what it does from now on comes after this layer of all loads."""
        ...

    def note_step(self, token_count: int) -> None: ...


class HostBlocks:
    """In host memory: a copy has ended with its step."""

    pins = None

    def __init__(self, copier: BlockCopier) -> None:
        self._copier = copier

    def make_lane(self) -> ThreadLane:
        return ThreadLane()

    def make_mover(
        self, arena: ArenaLike, settings: ConnectorSettings, clock: Clock, gate: Gate
    ) -> BlockMover:
        return BlockMover(arena, self._copier, settings, clock, gate)

    def fence(self, job_ids: Sequence[int]) -> None:
        pass

    def follow_layer(self, layer: int) -> None:
        raise AssertionError("an engine in host memory uses a load when it has ended")

    def note_step(self, token_count: int) -> None:
        pass


class WorkerConnector:
    """Moves what it is told to move, and nothing of a session that it was told to be quiet about.

    Invariants:
      (0) Once the quiet handler has returned for a session, no slot of it is touched again.
      (1) Once `withdraw` has returned for a job, no device block of it is touched again, or, on a
          device, not before what the engine queues from then on.
    """

    def __init__(
        self,
        client: WorkerClient,
        spec: NamespaceSpec,
        copier: BlockCopier | DeviceBlocks,
        *,
        place: Place = Place(),
        shard_bytes: int | None = None,
        settings: ConnectorSettings | None = None,
        clock: Clock | None = None,
        lane: CopyLane | None = None,
    ) -> None:
        """`shard_bytes`: of this worker's own shard, where others of the engine are larger."""
        self._client = client
        self._blocks: Blocks = copier if isinstance(copier, DeviceBlocks) else HostBlocks(copier)
        self._place = place
        self._shard_bytes = spec.shard_bytes if shard_bytes is None else shard_bytes
        self._settings = settings or ConnectorSettings()
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._open_counts: Counter[Any] = Counter()  # Jobs not ended, by session.
        # Refused for good: a plan under a lost session may come at any time. Grows by one a lost
        # session, and a session lasts at least one reconnect delay.
        self._refused: set[Any] = set()
        self._open_jobs: set[int] = set()
        self._withdrawn: set[int] = set()  # Of the open jobs.
        self._touching: set[int] = set()  # Jobs of which a step is being made.
        self._is_closed = False
        self._spec = spec
        self._mover = self._make_mover(spec)
        self._unstarted: list[JobResult] = []  # Jobs that no lane took, not yet polled.
        self._has_logged = False
        self._lane = lane or self._blocks.make_lane()
        if self._blocks.pins is not None:
            client.set_slab_pins(self._blocks.pins)
        client.add_quiet_handler(self._drain)

    def start(self, plan: StepPlan) -> None:
        """Queue the plan's copies, onboards first; returns at once.

        A job that cannot be queued, for whatever internal error, is reported as failed: an engine
        may be waiting for it.
        """
        if plan.spec != self._spec:
            self._open(plan.spec)
        jobs: list[Job] = [*plan.onboards, *plan.offloads]
        for job in jobs:
            progress = CopyProgress(job)
            if isinstance(job, OffloadJob) and not self._place.stores(job.job_id):
                self._unstarted.append(self._result_of(progress))
                continue
            with self._changed:
                self._open_counts[job.session] += 1
                self._open_jobs.add(job.job_id)
            if self._is_closed:
                progress.fail(FailReason.CLOSED, "the worker side is closed")
                self._unstarted.append(self._end(progress))
                continue
            try:
                steps = self._mover_of(plan.spec).steps(progress)
                if progress.failed is None:
                    self._lane.submit(Copy(progress, steps, self._end))
                else:
                    self._unstarted.append(self._end(progress))
            except Exception as error:
                if self._settings.raise_internal_errors:
                    raise
                self._log_once(error)
                progress.fail(FailReason.INTERNAL, f"{type(error).__name__}: {error}")
                self._unstarted.append(self._end(progress))

    def note_step(self, token_count: int) -> None:
        """A step of the engine begins: offloads beside it must not make it much longer."""
        self._blocks.note_step(token_count)

    @property
    def spec(self) -> NamespaceSpec:
        """The namespace that is copied to and from."""
        return self._spec

    def follow_layer(self, layer: int) -> None:
        """What the engine queues from now on comes after this layer of all loads that have not
        ended. Whether they were in time and right, their results say later."""
        self._blocks.follow_layer(layer)

    def poll(self) -> list[JobResult]:
        """The jobs that have ended since the last poll."""
        unstarted, self._unstarted = self._unstarted, []
        return [*self._lane.poll(), *unstarted]

    def withdraw(self, job_ids: Sequence[int]) -> None:
        """The engine is about to overwrite these jobs' device blocks.

        Returns when no copy touches them any more, which takes one slice at most; a job that has
        not ended by then is reported as failed.
        """
        with self._changed:
            self._withdrawn.update(self._open_jobs.intersection(job_ids))
            while self._touching & self._withdrawn:
                self._changed.wait()
        self._blocks.fence(job_ids)

    def enter(self, job: Job) -> FailReason | None:
        """Before every slice; see `Gate`. In the lane's thread, or in the engine's that begins a
        load by layers."""
        with self._changed:
            if job.job_id in self._withdrawn:
                return FailReason.WITHDRAWN
            if job.session in self._refused:
                return FailReason.STALE
            self._touching.add(job.job_id)
            return None

    def leave(self, job: Job) -> None:
        """After every slice."""
        with self._changed:
            self._touching.discard(job.job_id)
            self._changed.notify_all()

    def close(self) -> None:
        """End the copy under way and fail the rest; the client stays open."""
        self._is_closed = True
        self._lane.close()

    def _open(self, spec: NamespaceSpec) -> None:
        """Another namespace from now on. Without jobs too: the daemon gives no slots in slabs that
        a worker has not mapped, so there would never be one."""
        try:
            self._mover = self._make_mover(spec)
            self._spec = spec
        except Exception as error:
            if self._settings.raise_internal_errors:
                raise
            self._log_once(error)

    def _mover_of(self, spec: NamespaceSpec) -> Mover:
        assert spec == self._spec, "the plan's namespace could not be opened"
        return self._mover

    def _log_once(self, error: Exception) -> None:
        if not self._has_logged:
            log.error("internal error: copies fail on this worker", exc_info=error)
        self._has_logged = True

    def _make_mover(self, spec: NamespaceSpec) -> Mover:
        arena = self._client.arena(self._client.open_namespace(spec), self._place.shard)
        return self._blocks.make_mover(arena, self._settings, self._clock, self)

    def _end(self, progress: CopyProgress) -> JobResult:
        """In the lane's thread: the job touches its slots no more."""
        session = progress.job.session
        with self._changed:
            self._open_jobs.discard(progress.job.job_id)
            self._withdrawn.discard(progress.job.job_id)
            self._open_counts[session] -= 1
            if self._open_counts[session] == 0:
                del self._open_counts[session]
                self._changed.notify_all()
        return self._result_of(progress)

    def _result_of(self, progress: CopyProgress) -> JobResult:
        return progress.result(place=self._place, shard_bytes=self._shard_bytes)

    def _drain(self, session: Any) -> None:
        """In a thread of the client's: refuse the session, wait for the copies under way.

        Without a deadline on purpose: saying Quiet too early would let another write into slots
        that we still touch; saying it late only keeps them from use.
        """
        self._refused.add(session)
        with self._changed:
            while self._open_counts[session]:
                self._changed.wait()
