"""What travels between the scheduler side and the workers: frozen, picklable values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvtier.namespace import NamespaceSpec


class FailReason(StrEnum):
    """Why a worker did not do, or does not vouch for, a job."""

    DEADLINE = "deadline"  # The lease's deadline passed before the load started, or while it ran.
    STALE = "stale"  # Session, generation or slab are gone: the slots mean nothing any more.
    COPY = "copy"  # The engine's copier raised.
    CORRUPT = "corrupt"  # A sampled block differs from what this worker had offloaded.
    WITHDRAWN = "withdrawn"  # The engine overwrites the device blocks: there is nothing to offload.
    CLOSED = "closed"  # The worker side was closed before the job started.
    INTERNAL = "internal"  # A bug of ours; the log has the traceback.


@dataclass(frozen=True, slots=True)
class OnboardJob:
    """Copy leased slots into device blocks: slots[i] -> device_blocks[i]."""

    job_id: int
    request_id: str
    session: Any  # The SessionRef the lease was granted under.
    slots: tuple[int, ...]
    device_blocks: tuple[int, ...]
    deadline_ns: int  # CLOCK_MONOTONIC; a load that has not ended by then counts as failed.
    hashes: tuple[bytes, ...] = ()  # Only when workers verify by sample.


@dataclass(frozen=True, slots=True)
class OffloadJob:
    """Copy device blocks into reserved slots: device_blocks[i] -> slots[i]."""

    job_id: int
    request_id: str
    session: Any
    slots: tuple[int, ...]
    device_blocks: tuple[int, ...]
    hashes: tuple[bytes, ...] = ()  # Only when workers verify by sample.
    with_checksums: bool = False


Job = OnboardJob | OffloadJob


def facts_of(job: Job) -> dict[str, object]:
    """Of a line about it."""
    return {"job_id": job.job_id, "request": job.request_id}


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's jobs, all of one namespace. Every worker of the engine gets the same plan."""

    spec: NamespaceSpec
    onboards: tuple[OnboardJob, ...] = ()
    offloads: tuple[OffloadJob, ...] = ()


@dataclass(frozen=True, slots=True)
class JobResult:
    """One worker's report of one job."""

    job_id: int
    shard: int
    failed: FailReason | None  # None: done, and the bytes are right as far as the worker knows.
    seconds: float = 0.0
    bytes_count: int = 0
    failed_index: int = 0  # First block of the job that failed.
    checksums: tuple[int, ...] = ()  # xxh3-64 of this shard of each block, when asked for.
    message: str = ""
    replica: int = 0  # Of the workers that hold this shard.

    @property
    def worker(self) -> tuple[int, int]:
        """Who reports."""
        return self.shard, self.replica


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the engine must know after a step's results.

    A request id stands in `onboarded` or `failed` at most once for every onboard planned for it,
    and in `released` once after `request_finished` or `on_preempted` said True. A request that was
    finished or preempted while it was being onboarded stands in `released` alone.
    """

    onboarded: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()  # Recompute what was promised; nothing of it may be used.
    released: tuple[str, ...] = ()  # No job touches its former device blocks any more.
