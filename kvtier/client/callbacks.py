"""Runs the caller's handlers off the session's thread, one at a time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("kvtier.client")

# Jobs are one a lost session and one a recall; more than this means that a handler hangs, and
# then the daemon's quarantine holds whatever was not reported.
JOB_COUNT_MAX = 1024


class Callbacks:
    """A queue whose thread lives only while there is work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if len(self._jobs) >= JOB_COUNT_MAX:
                logger.error("a handler hangs; dropping a callback")
                return
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvtier-callbacks", daemon=True
                )
                self._thread.start()

    def join(self, timeout_seconds: float) -> None:
        with self._lock:  # Else it may be one that is just being started.
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_seconds)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:
                logger.exception("a handler failed")
