"""The lane of copies that run on a device's streams: one thread that asks, submits and looks.

It never waits for the device, and while copies are under way it looks at their events again and
again, with short pauses: an event tells nobody by itself. Whatever fails, it goes on: an engine
waits for the copies, and the daemon for our word that they have ended.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from kvtier.connector.copy_lane import Copy, Results
from kvtier.connector.jobs import JobResult
from kvtier.cuda.streams import CopyStreams

log = logging.getLogger(__name__)

# Between two looks: a block of 2 MiB takes 40 us of PCIe 5, a step of an engine 10 ms.
LOOK_SECONDS = 100e-6
# Between two looks at what can be done while nothing is copied.
IDLE_SECONDS = 0.25
CLOSE_SECONDS = 10.0


class StreamLane:
    """All copies are under way at once; the streams put loads before stores."""

    def __init__(
        self,
        streams: CopyStreams,
        *,
        on_start: Callable[[], None] = lambda: None,
        on_idle: Callable[[], object] = lambda: None,
        on_end: Callable[[], object] = lambda: None,
        threaded: bool = True,
        name: str = "kvtier-copies",
    ) -> None:
        """`on_start` is called once in the thread, `on_idle` now and then while nothing waits,
        `on_end` once no copy is under way any more and none will be.
        Not `threaded`: somebody calls `step` instead."""
        self._streams = streams
        self._on_start, self._on_idle, self._on_end = on_start, on_idle, on_end
        self._changed = threading.Condition()
        self._new: deque[Copy] = deque()
        self._under_way: list[Copy] = []  # The thread's own.
        self._results = Results()
        self._closed = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def submit(self, copy: Copy) -> None:
        with self._changed:
            if not self._closed:
                self._new.append(copy)
                self._changed.notify()
                return
        self._results.end_unrun(copy)

    def poll(self) -> list[JobResult]:
        return self._results.take()

    def close(self) -> None:
        """Call off what is not queued, wait for what is, give the streams up."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is None:
            self._end_all()
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("copies on the device do not end: their slots stay held")

    def step(self) -> bool:
        """Begin what is new, submit, see what has ended; whether something is under way."""
        self._begin_new()
        self._look()
        return bool(self._under_way)

    def _run(self) -> None:
        try:
            self._on_start()
        except Exception:
            log.exception("the copying thread could not begin")
        while not self._closed:
            is_busy = self.step()
            with self._changed:
                if not self._new and not self._closed:
                    self._changed.wait(LOOK_SECONDS if is_busy else IDLE_SECONDS)
                is_idle = not (self._new or is_busy or self._closed)
            if is_idle:
                self._idle()
        self._end_all()

    def _idle(self) -> None:
        try:
            self._on_idle()
        except Exception:
            log.exception("what was to be done ahead failed, and is left undone")
            self._on_idle = lambda: None

    def _begin_new(self) -> None:
        with self._changed:
            new = list(self._new)
            self._new.clear()
        for copy in new:
            if not self._step(copy):
                self._under_way.append(copy)

    def _look(self) -> None:
        """Submit, see what has ended, and end it."""
        if not self._under_way:
            return
        self._guarded(self._streams.poll)
        self._under_way = [copy for copy in self._under_way if not self._step(copy)]

    def _step(self, copy: Copy) -> bool:
        """Whether the copy has ended with this step."""
        try:
            next(copy.steps)
            return False
        except StopIteration:
            self._results.end(copy)
        except Exception as error:
            log.exception("copy ended unexpectedly")
            self._results.end_bug(copy, error)
        return True

    def _guarded(self, do: Callable[[], object]) -> None:
        """What the streams do. A failure that they do not know themselves leaves nobody who could
        tell the end of a copy."""
        try:
            do()
        except Exception as error:
            log.exception("no copies on the device from now on")
            self._streams.give_up(error)

    def _end_all(self) -> None:
        with self._changed:
            left = list(self._new)
            self._new.clear()
        for copy in left:
            if copy.progress.is_begun:
                self._under_way.append(copy)
            else:
                self._results.end_unrun(copy)
        self._guarded(self._streams.close)
        self._look()
        try:
            self._on_end()
        except Exception:
            log.exception("what the copies used is left to the end of the process")
