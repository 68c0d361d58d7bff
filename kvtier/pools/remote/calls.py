"""Calls that cannot be taken back: whoever waits may stop, the call goes on and keeps its place.

A thread in a hanging file system, a library that has no cancel: the wait ends at its deadline
(law 2), and the number of such calls is bounded, for each of them holds one of `depth` places until
it has returned. When all hang, later calls end at their own deadlines without having begun.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, T]]


class Calls:
    """At most `depth` under way; all methods belong to one event loop."""

    def __init__(self, depth: int) -> None:
        self._places = asyncio.Semaphore(depth)
        self._under_way: set[asyncio.Task[Any]] = set()

    @property
    def under_way_count(self) -> int:
        """Those included that nobody waits for any more."""
        return len(self._under_way)

    async def run(self, works: Sequence[Work[T]], timeout_seconds: float, late: T) -> list[T]:
        """What each returned, or `late`. A work must not raise, and it ends by itself or never."""
        if not works:
            return []
        waits = [asyncio.ensure_future(self._run_one(work)) for work in works]
        try:
            await asyncio.wait(waits, timeout=timeout_seconds)
        finally:
            for wait in waits:
                wait.cancel()  # Nothing happens to one that is done.
        return [wait.result() if wait.done() and not wait.cancelled() else late for wait in waits]

    async def close(self, timeout_seconds: float) -> bool:
        """Wait for what is under way; False when something still hangs."""
        if self._under_way:
            await asyncio.wait(set(self._under_way), timeout=timeout_seconds)
        return not self._under_way

    async def _run_one(self, work: Work[T]) -> T:
        await self._places.acquire()
        task: asyncio.Task[T] = asyncio.ensure_future(work())
        self._under_way.add(task)
        task.add_done_callback(self._on_done)
        return await asyncio.shield(task)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        self._places.release()


class Borrowed:
    """Memory of a caller's that threads use for a call, until it is given back."""

    def __init__(self) -> None:
        """In the running loop."""
        self._loop = asyncio.get_running_loop()
        self._unused: asyncio.Future[None] = self._loop.create_future()
        self._lock = threading.Lock()  # Guards the rest.
        self._use_count = 0
        self._is_over = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For a thread. Raises TimeoutError when the memory was given back already."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    async def give_back(self) -> None:
        """Nobody uses it any more when this returns, even if it is cancelled meanwhile. Waits for
        those who do, so their use must be bounded."""
        with self._lock:
            self._is_over = True
            if not self._use_count:
                return
        await finished(self._unused)

    def _begin(self) -> None:
        with self._lock:
            if self._is_over:
                raise TimeoutError
            self._use_count += 1

    def _end(self) -> None:
        with self._lock:
            self._use_count -= 1
            if self._is_over and not self._use_count:
                self._loop.call_soon_threadsafe(self._unused.set_result, None)


async def ended_in_time(
    works: Sequence[Coroutine[Any, Any, T]], timeout_seconds: float, late: T
) -> list[T]:
    """For works that can be cancelled: the result of each, or `late` for those cancelled."""
    if not works:
        return []
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, timeout=timeout_seconds)
    finally:
        pending = [task for task in tasks if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
    return [late if task in pending else task.result() for task in tasks]


async def finished(work: asyncio.Future[T]) -> T:
    """The result, even if we are cancelled meanwhile; the cancellation is passed on then.

    For threads that read or write memory of the caller: it gets it back when they are done.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])  # Being cancelled here leaves `work` running.
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not work.cancelled():
            work.exception()  # Seen: the caller is gone.
        raise cancelled
    return work.result()
