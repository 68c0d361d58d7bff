"""The connector's control thread and copy lane, moved by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvtier.connector.control import Note, perform
from kvtier.connector.copy_lane import Copy
from kvtier.connector.jobs import FailReason, JobResult, OnboardJob
from kvtier.errors import KVTierError

T = TypeVar("T")


class SteppedControl:
    """A kvtier.connector.control.Control whose calls are made when a test says so."""

    def __init__(self, *, background_max: int = 1024) -> None:
        self._background_max = background_max
        self._urgent: deque[Callable[[], Note]] = deque()
        self._background: deque[Callable[[], Note]] = deque()
        self._waiting: deque[Callable[[], Note]] = deque()
        self._late: deque[Note] = deque()  # Answers of waits that are still on their way.
        self._inbox: deque[Note] = deque()
        self.pauses: list[float] = []
        self.on_pause: Callable[[], object] = lambda: None  # What happens meanwhile.
        self.is_closed = False
        self.is_eager = False  # Make each call at once, as a thread that is very quick would.

    @property
    def queued_count(self) -> int:
        return len(self._urgent) + len(self._background)

    @property
    def waiting_count(self) -> int:
        """Waits asked for whose answers have not come."""
        return len(self._waiting) + len(self._late)

    def ask(
        self, call: Callable[[], T], on_answer: Callable[[T | KVTierError], None], *, urgent: bool
    ) -> bool:
        if self.is_closed or (not urgent and len(self._background) >= self._background_max):
            return False

        (self._urgent if urgent else self._background).append(_run(call, on_answer))
        if self.is_eager:
            self.step()
        return True

    def ask_waiting(
        self, call: Callable[[], T], on_answer: Callable[[T | KVTierError], None]
    ) -> bool:
        if self.is_closed:
            return False
        self._waiting.append(_run(call, on_answer))
        return True

    def begin_waits(self, count: int = 1_000_000) -> None:
        """Make up to `count` waiting calls; what the daemon does for them is done."""
        for _ in range(min(count, len(self._waiting))):
            self._late.append(self._waiting.popleft()())

    def end_waits(self, count: int = 1_000_000) -> None:
        """Let up to `count` of their answers arrive at the next hook."""
        for _ in range(min(count, len(self._late))):
            self._inbox.append(self._late.popleft())

    def step(self, count: int = 1_000_000) -> int:
        """Make up to `count` queued calls; their answers arrive at the next hook."""
        done = 0
        while done < count and self.queued_count:
            run = (self._urgent or self._background).popleft()
            self._inbox.append(run())
            done += 1
        return done

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.on_pause()

    def post(self, note: Note) -> None:
        self._inbox.append(note)

    def drain(self, count_max: int) -> None:
        for _ in range(min(count_max, len(self._inbox))):
            self._inbox.popleft()()

    def close(self, timeout_seconds: float) -> None:
        self.step()
        self.is_closed = True


def _run(call: Callable[[], T], on_answer: Callable[[T | KVTierError], None]) -> Callable[[], Note]:
    def run() -> Note:
        answer = perform(call)
        return lambda: on_answer(answer)

    return run


class SteppedLane:
    """A kvtier.connector.copy_lane.CopyLane that copies when a test says so."""

    def __init__(self) -> None:
        self.copies: deque[Copy] = deque()
        self._results: list[JobResult] = []

    def submit(self, copy: Copy) -> None:
        if isinstance(copy.progress.job, OnboardJob):
            index = sum(isinstance(c.progress.job, OnboardJob) for c in self.copies)
            self.copies.insert(index, copy)
        else:
            self.copies.append(copy)

    def step(self, count: int = 1_000_000) -> None:
        """Run up to `count` steps of the first copies."""
        for _ in range(count):
            if not self.copies:
                return
            copy = self.copies[0]
            if next(copy.steps, self) is self:  # `steps` yields None; exhausted, it gives `self`.
                self.copies.popleft()
                self._results.append(copy.end(copy.progress))

    def poll(self) -> list[JobResult]:
        results, self._results = self._results, []
        return results

    def close(self) -> None:
        for copy in self.copies:
            copy.progress.fail(FailReason.CLOSED)
            self._results.append(copy.end(copy.progress))
        self.copies.clear()
