"""One worker's copies, step by step, with every check on the way; knows no thread.

A step copies a slice of one job. Between two steps the lane may put another job first, and every
step takes its views anew: a session or slab may be gone meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvtier.checksum import shard_checksum
from kvtier.clock import Clock
from kvtier.connector.client_api import ArenaLike, SlotView
from kvtier.connector.jobs import FailReason, Job, JobResult, OffloadJob, OnboardJob, facts_of
from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.sharding import Place
from kvtier.errors import KVTierError

log = logging.getLogger(__name__)


class BlockCopier(Protocol):
    """The engine's side of a copy: it knows how its device blocks lie in memory."""

    def copy_out(self, device_blocks: Sequence[int], views: Sequence[SlotView]) -> None:
        """device_blocks[i] -> views[i]; the copy has ended when this returns."""
        ...

    def copy_in(self, device_blocks: Sequence[int], views: Sequence[SlotView]) -> None:
        """views[i] -> device_blocks[i]; the copy has ended when this returns."""
        ...


class Gate(Protocol):
    """Says of every slice whether it may still be copied, and hears when that has ended."""

    def enter(self, job: Job) -> FailReason | None:
        """None: go on, until `leave`; otherwise why not."""
        ...

    def leave(self, job: Job) -> None: ...


class Mover(Protocol):
    """Copies the jobs of one namespace and shard."""

    def steps(self, progress: CopyProgress) -> Iterator[None]:
        """Called in the engine's thread; the lane's then goes through it, step by step. Never
        raises: a failure ends it and stands in `progress`, at once if nothing was begun."""
        ...


REFUSALS = {
    FailReason.STALE: "we are quiet about this session",
    FailReason.WITHDRAWN: "the engine takes the device blocks away",
}


class ChecksumLedger:
    """What this worker offloaded, by hash: to verify onboards by sample. Oldest out first."""

    def __init__(self, *, count_max: int) -> None:
        self._count_max = count_max
        self._checksums: dict[bytes, int] = {}

    def note(self, block_hash: bytes, checksum: int) -> None:
        self._checksums.pop(block_hash, None)
        self._checksums[block_hash] = checksum
        if len(self._checksums) > self._count_max:
            del self._checksums[next(iter(self._checksums))]

    def checksum_of(self, block_hash: bytes) -> int | None:
        return self._checksums.get(block_hash)


class CopyProgress:
    """One job on its way: `steps` moves the bytes, `result` says what came of it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.failed: FailReason | None = None
        self.message = ""
        self.done_count = 0  # Blocks copied; the first one that failed has this index.
        self.seconds = 0.0
        self.checksums: list[int] = []
        self.is_begun = False  # Its slots are held, before the lane has seen it.

    def fail(self, reason: FailReason, message: str = "") -> None:
        self.failed, self.message = reason, message

    def result(self, *, place: Place, shard_bytes: int) -> JobResult:
        return JobResult(
            job_id=self.job.job_id,
            shard=place.shard,
            failed=self.failed,
            seconds=self.seconds,
            bytes_count=self.done_count * shard_bytes,
            failed_index=min(self.done_count, max(0, len(self.job.slots) - 1)),
            checksums=tuple(self.checksums),
            message=self.message,
            replica=place.replica,
        )


class ByteChecks:
    """Of one worker's copies: checksums of what goes out, samples of what comes in."""

    def __init__(self, settings: ConnectorSettings) -> None:
        self._verify_one_in = settings.verify_one_in
        self._ledger = ChecksumLedger(count_max=settings.resident_hashes_max)
        self._onboarded_count = 0

    def note(
        self, job: OffloadJob, progress: CopyProgress, first: int, views: Sequence[SlotView]
    ) -> None:
        """These views hold the job's blocks from `first` on."""
        if not job.with_checksums and not job.hashes:
            return
        checksums = [shard_checksum(view) for view in views]
        if job.with_checksums:
            progress.checksums.extend(checksums)
        for block_hash, checksum in zip(job.hashes[first:], checksums, strict=False):
            self._ledger.note(block_hash, checksum)

    def are_right(self, job: OnboardJob, progress: CopyProgress, views: Sequence[SlotView]) -> bool:
        """Whether the sampled blocks are what was offloaded under their hashes; if not, the job
        has failed."""
        every = self._verify_one_in
        if every == 0:
            return True
        for index, (block_hash, view) in enumerate(zip(job.hashes, views, strict=False)):
            self._onboarded_count += 1
            if self._onboarded_count % every:
                continue
            known = self._ledger.checksum_of(block_hash)
            if known is not None and known != shard_checksum(view):
                progress.done_count = index
                progress.fail(FailReason.CORRUPT, "the bytes are not those offloaded here")
                return False
        return True


class BlockMover:
    """Runs the steps of jobs of one namespace and shard."""

    def __init__(
        self,
        arena: ArenaLike,
        copier: BlockCopier,
        settings: ConnectorSettings,
        clock: Clock,
        gate: Gate,
    ) -> None:
        self._arena = arena
        self._copier = copier
        self._settings = settings
        self._clock = clock
        self._gate = gate
        self._checks = ByteChecks(settings)

    def steps(self, progress: CopyProgress) -> Iterator[None]:
        """Copy slice by slice."""
        job = progress.job
        is_load = isinstance(job, OnboardJob)
        if isinstance(job, OnboardJob) and self._clock.now_ns() >= job.deadline_ns:
            progress.fail(FailReason.DEADLINE, "not started by the lease's deadline")
            return
        # A load goes in one piece: nothing goes before it, so slices would only cost.
        slice_blocks = len(job.slots) if is_load else self._settings.offload_slice_blocks
        while progress.done_count < len(job.slots):
            refusal = self._gate.enter(job)
            if refusal is not None:
                progress.fail(refusal, REFUSALS[refusal])
                return
            last = min(progress.done_count + slice_blocks, len(job.slots))
            start_ns = self._clock.now_ns()
            try:
                self._copy_slice(progress, progress.done_count, last)
            except KVTierError as error:
                progress.fail(FailReason.STALE, f"{type(error).__name__}: {error}")
            except Exception as error:  # The engine's copier: its failure must end this job alone.
                log.exception("copy failed", extra=facts_of(job))
                progress.fail(FailReason.COPY, f"{type(error).__name__}: {error}")
            finally:
                self._gate.leave(job)
            progress.seconds += (self._clock.now_ns() - start_ns) / 1e9
            if progress.failed is not None:
                return
            progress.done_count = last
            yield
        if isinstance(job, OnboardJob) and self._clock.now_ns() > job.deadline_ns:
            progress.fail(FailReason.DEADLINE, "ended after the lease's deadline")

    def _copy_slice(self, progress: CopyProgress, first: int, last: int) -> None:
        job = progress.job
        device_blocks = job.device_blocks[first:last]
        with self._arena.hold(job.slots[first:last], job.session) as views:
            if isinstance(job, OffloadJob):
                self._copier.copy_out(device_blocks, views)
                self._checks.note(job, progress, first, views)
            elif self._checks.are_right(job, progress, views):
                self._copier.copy_in(device_blocks, views)
