"""Where copies run: a thread here, CUDA streams later, behind one small interface."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvtier.connector.copying import CopyProgress
from kvtier.connector.jobs import FailReason, JobResult, OnboardJob

log = logging.getLogger(__name__)

EndHandler = Callable[[CopyProgress], JobResult]


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A job as a lane runs it: `steps` until it ends, then `end` makes the result."""

    progress: CopyProgress
    steps: Iterator[None]
    end: EndHandler


class Results:
    """Of copies that have ended: put in by a lane's thread, taken out by the engine's."""

    def __init__(self) -> None:
        self._results: deque[JobResult] = deque()

    def end(self, copy: Copy) -> None:
        self._results.append(copy.end(copy.progress))

    def end_unrun(self, copy: Copy) -> None:
        copy.progress.fail(FailReason.CLOSED, "the worker side is closed")
        self.end(copy)

    def end_bug(self, copy: Copy, error: Exception) -> None:
        """A bug of ours must end this job alone, or the engine waits."""
        copy.progress.fail(FailReason.INTERNAL, f"{type(error).__name__}: {error}")
        self.end(copy)

    def take(self) -> list[JobResult]:
        """Those since the last call; never waits."""
        found: list[JobResult] = []
        while self._results:  # Only this method takes out, so an element seen is there to take.
            found.append(self._results.popleft())
        return found


class CopyLane(Protocol):
    """Runs copies, onboards before offloads, each kind in the order of submission."""

    def submit(self, copy: Copy) -> None:
        """Take the copy over; returns at once."""
        ...

    def poll(self) -> list[JobResult]:
        """The results since the last poll; never waits."""
        ...

    def close(self) -> None:
        """End the copy under way, fail the others, then return."""
        ...


class ThreadLane:
    """One thread; looks for a waiting onboard between two slices of an offload."""

    def __init__(self, *, name: str = "kvtier-copies") -> None:
        self._changed = threading.Condition()
        self._onboards: deque[Copy] = deque()
        self._offloads: deque[Copy] = deque()
        self._results = Results()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, copy: Copy) -> None:
        is_load = isinstance(copy.progress.job, OnboardJob)
        with self._changed:
            if not self._closed:
                (self._onboards if is_load else self._offloads).append(copy)
                self._changed.notify()
                return
        self._results.end_unrun(copy)

    def poll(self) -> list[JobResult]:
        return self._results.take()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (copy := self._next()) is not None:
            self._run_copy(copy)
        with self._changed:
            left = [*self._onboards, *self._offloads]
        for copy in left:
            self._results.end_unrun(copy)

    def _run_copy(self, copy: Copy) -> None:
        try:
            for _ in copy.steps:
                self._run_onboards(copy)
        except Exception as error:
            log.exception("copy ended unexpectedly")
            self._results.end_bug(copy, error)
            return
        self._results.end(copy)

    def _next(self) -> Copy | None:
        """The next copy; None once closed."""
        with self._changed:
            while not self._closed and not self._onboards and not self._offloads:
                self._changed.wait()
            if self._closed:
                return None
            return (self._onboards or self._offloads).popleft()

    def _run_onboards(self, current: Copy) -> None:
        """Between two slices of an offload: an engine waits for these."""
        if isinstance(current.progress.job, OnboardJob):
            return
        while self._onboards and not self._closed:
            self._run_copy(self._onboards.popleft())
