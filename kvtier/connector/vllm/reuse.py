"""Which device blocks vLLM overwrites while a copy still reads them, or is yet to.

vLLM frees a request's blocks when it ends or is preempted, and we do not ask it to wait: held
blocks could make its own resets fail, and are memory that requests could use. A freed block keeps
its bytes until it is allocated again. So whatever is allocated in a step is compared with what is
being read, and a copy that has not ended by then is withdrawn before the step writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.connector.jobs import JobResult, OffloadJob


class ReuseWatch:
    """Owned by the scheduler's thread."""

    def __init__(self) -> None:
        self._allocated: set[int] = set()  # Since the last step.
        self._reader: dict[int, int] = {}  # Device block -> the offload that reads it.
        self._read: dict[int, tuple[int, ...]] = {}  # The same, by job.
        # Of ended requests with blocks to plan. Most are gone again before anything is allocated,
        # so the sets are made when one is needed.
        self._parked: dict[str, Sequence[int] | frozenset[int]] = {}

    @property
    def is_idle(self) -> bool:
        return not (self._read or self._parked)

    def note_allocated(self, device_blocks: Iterable[int]) -> None:
        """These are written from the next step on."""
        self._allocated.update(device_blocks)

    def park(self, request_id: str, device_blocks: Sequence[int]) -> None:
        """The request has ended, and more of these blocks are to be offloaded.

        Another one of the same id may end before all is told of the first.
        """
        known = self._parked.get(request_id, ())
        self._parked[request_id] = (*known, *device_blocks) if known else device_blocks

    def unpark(self, request_id: str) -> None:
        self._parked.pop(request_id, None)

    def is_parked_block_allocated(self) -> bool:
        """Whether blocks of an ended request are lost, so that no more of them may be planned."""
        if not self._allocated:
            return False
        for request_id, blocks in self._parked.items():
            found = blocks if isinstance(blocks, frozenset) else frozenset(blocks)
            self._parked[request_id] = found
            if not found.isdisjoint(self._allocated):
                return True
        return False

    def begin_step(self, jobs: Sequence[OffloadJob]) -> tuple[list[OffloadJob], tuple[int, ...]]:
        """Of the newly planned `jobs` those to be copied, and earlier ones to be withdrawn."""
        allocated, self._allocated = self._allocated, set()
        fenced = {self._reader[block] for block in allocated if block in self._reader}
        good = []
        for job in jobs:
            if not allocated.isdisjoint(job.device_blocks):
                continue
            good.append(job)
        self.note_read(good)
        return good, tuple(sorted(fenced))

    def note_read(self, jobs: Sequence[OffloadJob]) -> None:
        """These jobs read, from this step on."""
        for job in jobs:
            self._read[job.job_id] = job.device_blocks
            for block in job.device_blocks:
                self._reader[block] = job.job_id

    def note_results(self, results: Sequence[JobResult]) -> None:
        """These jobs read nothing any more, on no rank."""
        for result in results:
            for block in self._read.pop(result.job_id, ()):
                if self._reader.get(block) == result.job_id:
                    del self._reader[block]
