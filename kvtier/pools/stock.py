"""Slab stock: threads that populate slabs in the background, and the limit on how many there are.

Invariant: slabs alive or in the making never exceed `slab_count_max`. A slab that the system
refuses is a value, `PopulateRefused`, not the end of the daemon: what was populated before is a
smaller pool that works.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvtier.clock import Clock
from kvtier.pools.slabs import PopulateCancelled, Slab
from kvtier.pools.source import MemorySource, SlabSource
from kvtier.types import SlabId

# Populating is bound by memory bandwidth and, collapsed, by the kernel's locks: more threads
# than these add little and take cores from the engines.
PARALLEL_MAX = 4
# Left to others when a slab is populated: running the node out of memory would kill engines.
RESERVE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class PopulateRefused:
    """The system gave no memory for this slab; `reason` is for people."""

    id: SlabId
    reason: str


Outcome = Slab | PopulateRefused


class SlabStock:
    """Populates slabs on request; each answers with one call of `on_outcome`, in a thread of ours.

    After `stop` no further call begins.
    """

    def __init__(
        self,
        *,
        slab_bytes: int,
        slab_count_max: int,
        on_outcome: Callable[[Outcome], None],
        clock: Clock,
        parallel: int = min(PARALLEL_MAX, os.cpu_count() or 1),
        reserve_bytes: int = RESERVE_BYTES,
        source: SlabSource | None = None,
    ) -> None:
        """`source`: where the slabs come from; this machine's memory when left out."""
        self.source = MemorySource() if source is None else source
        self.slab_bytes = slab_bytes
        self.slab_count_max = slab_count_max
        self._on_outcome = on_outcome
        self._clock = clock
        self._reserve_bytes = reserve_bytes
        self._id_next = 1  # Of the thread that requests.
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="kvtier-populate")
        self._lock = threading.Lock()  # Guards the rest.
        self._slab_count = 0  # Alive or in the making.
        self._making_count = 0  # In a thread now: their memory is not yet in the system's books.

    @property
    def slab_count(self) -> int:
        """Slabs alive, in the making or waiting for their turn."""
        return self._slab_count

    def request(self, count: int) -> int:
        """Have up to `count` more slabs populated; returns how many the limit allowed."""
        with self._lock:
            allowed = max(0, min(count, self.slab_count_max - self._slab_count))
            self._slab_count += allowed
        for _ in range(allowed):
            self._threads.submit(self._make, SlabId(self._id_next))
            self._id_next += 1
        return allowed

    def skip_ids(self, id_next: int) -> None:
        """Before the first request: lower numbers are those of a former life."""
        self._id_next = max(self._id_next, id_next)

    def adopt(self, slab: Slab) -> None:
        """One more slab alive, which a former life has populated."""
        with self._lock:
            assert self._slab_count < self.slab_count_max, "more slabs than the budget allows"
            self._slab_count += 1
        self.source.adopt(slab)

    def give_back(self, slab: Slab) -> None:
        """End a slab that nobody uses any more; its place counts as free again.

        Not for the event loop: it takes 4 ms a GiB of huge pages, and 300 ms of base pages.
        """
        self.source.end(slab)
        self._forget()

    def stop(self) -> None:
        """Cancel what is in the making and wait for the threads; slabs handed out stay."""
        self._stopped.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _make(self, slab_id: SlabId) -> None:
        with self._lock:
            self._making_count += 1
            making_count = self._making_count
        try:
            outcome = self._populate(slab_id, making_count)
        except PopulateCancelled:
            self._forget()
            return
        finally:
            with self._lock:
                self._making_count -= 1
        if isinstance(outcome, PopulateRefused):
            self._forget()
        elif self._stopped.is_set():
            self.give_back(outcome)
            return
        self._on_outcome(outcome)

    def _populate(self, slab_id: SlabId, making_count: int) -> Outcome:
        needed_bytes = making_count * self.slab_bytes + self._reserve_bytes
        room_bytes = self.source.room_bytes()
        if room_bytes is not None and room_bytes < needed_bytes:
            return PopulateRefused(
                slab_id,
                f"{room_bytes >> 20} MiB of {self.source.name} are available, "
                f"{needed_bytes >> 20} MiB needed ({self._reserve_bytes >> 20} MiB stay with "
                "others)",
            )
        try:
            return self.source.populate(
                slab_id, self.slab_bytes, clock=self._clock, is_cancelled=self._stopped.is_set
            )
        except OSError as error:
            return PopulateRefused(slab_id, str(error))

    def _forget(self) -> None:
        with self._lock:
            self._slab_count -= 1
