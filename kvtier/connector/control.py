"""The control thread: makes the client's calls, so that hooks of the engine's thread never wait.

Hooks `ask`; answers come to the inbox, and the engine's thread handles them in its next hook. So
all planning state belongs to the engine's thread and needs no lock.

Two lanes: urgent calls (acquire, release, reserve, commit, abort) go before background ones
(match), each lane in order. Urgent calls need no bound of their own: every one of them stands for a
lease, a reserved slot or a request that is bounded elsewhere. Calls that wait for a disk go beside
both, in threads of their own, which the control thread starts: starting one takes longer than a
hook may.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from kvtier.connector.waiting import WaitingThreads
from kvtier.errors import KVTierError, Unavailable

T = TypeVar("T")
log = logging.getLogger(__name__)

Note = Callable[[], None]


class Control(Protocol):
    """Where hooks leave their calls; tests step through it by hand."""

    def ask(
        self, call: Callable[[], T], on_answer: Callable[[T | KVTierError], None], *, urgent: bool
    ) -> bool:
        """Queue `call`; False (and never an answer) when its lane is full or closed."""
        ...

    def ask_waiting(
        self, call: Callable[[], T], on_answer: Callable[[T | KVTierError], None]
    ) -> bool:
        """Queue a call that holds up no other; False (and never an answer) when closed."""
        ...

    def pause(self, seconds: float) -> None:
        """For a waiting call: do nothing for so long, or until all is closed."""
        ...

    def post(self, note: Note) -> None:
        """From any thread: run `note` in the engine's thread, at its next hook."""
        ...

    def drain(self, count_max: int) -> None:
        """Engine's thread only: handle up to `count_max` answers that have arrived."""
        ...

    def close(self, timeout_seconds: float) -> None:
        """Make the calls queued so far, for at most this long, and end; nothing that waits."""
        ...


def perform(call: Callable[[], T]) -> T | KVTierError:
    """The answer of `call`, or its error as a value."""
    try:
        return call()
    except KVTierError as error:
        return error
    except Exception as error:  # A bug of ours must not end the engine.
        log.exception("connector call failed unexpectedly")
        return Unavailable(f"unexpected {type(error).__name__} in a connector call")


class ControlThread:
    """One daemon thread; ends with `close` or with the process."""

    def __init__(
        self, *, background_max: int, waiting_max: int, name: str = "kvtier-connector"
    ) -> None:
        self._background_max = background_max
        self._waiting = WaitingThreads(count_max=waiting_max, name=f"{name}-waiting")
        self._urgent: deque[Note] = deque()
        self._background: deque[Note] = deque()
        # One True for each queued call.
        self._wakeups: SimpleQueue[bool] = SimpleQueue()  # bounded: by the two lanes
        self._inbox: SimpleQueue[Note] = SimpleQueue()  # bounded: one for each call made
        self._closed = False
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(
        self, call: Callable[[], T], on_answer: Callable[[T | KVTierError], None], *, urgent: bool
    ) -> bool:
        if self._closed or (not urgent and len(self._background) >= self._background_max):
            return False
        (self._urgent if urgent else self._background).append(self._to_inbox(call, on_answer))
        self._wakeups.put(True)
        return True

    def ask_waiting(
        self, call: Callable[[], T], on_answer: Callable[[T | KVTierError], None]
    ) -> bool:
        if self._closed:
            return False
        run = self._to_inbox(call, on_answer)
        self._urgent.append(lambda: self._waiting.run(run))
        self._wakeups.put(True)
        return True

    def pause(self, seconds: float) -> None:
        self._is_closing.wait(seconds)

    def post(self, note: Note) -> None:
        self._inbox.put(note)

    def drain(self, count_max: int) -> None:
        for _ in range(count_max):
            try:
                note = self._inbox.get_nowait()
            except Empty:
                return
            note()

    def close(self, timeout_seconds: float) -> None:
        if self._closed:
            return
        self._closed = True
        self._is_closing.set()
        self._background.clear()
        self._wakeups.put(False)
        self._thread.join(timeout_seconds)

    def _to_inbox(
        self, call: Callable[[], T], on_answer: Callable[[T | KVTierError], None]
    ) -> Note:
        def run() -> None:
            answer: Any = perform(call)
            self._inbox.put(lambda: on_answer(answer))

        return run

    def _run(self) -> None:
        while self._wakeups.get():  # False, put by close, comes after all calls queued before.
            if self._urgent:
                self._urgent.popleft()()
            elif self._background:
                self._background.popleft()()
        self._waiting.close()
