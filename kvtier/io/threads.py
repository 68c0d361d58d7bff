"""A bounded number of threads for calls that may hang in the kernel.

Unlike the standard pool: the threads are daemons, so that a file system which hangs does not keep
the process from ending; and what waits for a thread is bounded.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class IoThreads(Executor):
    """`count` threads, begun with the first call. Any thread may submit."""

    def __init__(self, name: str, *, count: int, waiting_max: int = 1024) -> None:
        self._name = name
        self._count = count
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(waiting_max)
        self._lock = threading.Lock()  # Guards the rest.
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def count(self) -> int:
        return self._count

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Raises RuntimeError when `waiting_max` calls wait already, or after `shutdown`."""
        done: Future[Any] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                found = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  # Raised again where it is waited for.
                done.set_exception(error)
            else:
                done.set_result(found)

        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name}: closed")
            try:
                self._waiting.put_nowait(run)
            except queue.Full:
                raise RuntimeError(f"{self._name}: {self._waiting.maxsize} calls wait") from None
            if len(self._threads) < self._count:
                self._begin_thread()
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """No call begins any more but those that wait; with `wait`, for a second."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                break  # All hang: they are daemons.
        if wait:
            for thread in threads:
                thread.join(1.0 / max(len(threads), 1))

    def _begin_thread(self) -> None:
        number = len(self._threads)
        thread = threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:  # Ended by `shutdown`.
            work()
            del work  # Or what it held would be held until the next one comes.
