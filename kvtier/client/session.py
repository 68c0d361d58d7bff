"""The thread that opens a session, keeps it, and opens the next one when it is lost.

It owns the door (sockets, descriptors) and the probe. Nobody waits for it: calls fail at once while
it works.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from contextlib import suppress

import grpc

from kvtier.client import calls
from kvtier.client.backoff import Backoff
from kvtier.client.breaker import BreakerState
from kvtier.client.codec import named_error
from kvtier.client.doors import Door, SessionEnded
from kvtier.client.link import Link, OpenSession
from kvtier.client.rpc import cancel
from kvtier.errors import KVTierError
from kvtier.v1 import kvtier_pb2 as pb

logger = logging.getLogger("kvtier.client")

JOIN_SECONDS = 5.0
# A daemon that is away for longer may not come back: its memory must not be ours for ever.
KEPT_ABSENT_SECONDS = 60.0


class Waker:
    """Ends the thread's wait from any other thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._is_open = True

    def wake(self) -> None:
        with self._lock:  # After `close` the number may be somebody else's descriptor.
            if self._is_open:
                os.eventfd_write(self.fd, 1)

    def drain(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self.fd)

    def close_in_child(self) -> None:
        """Without the lock: a thread that the child does not have may hold it."""
        if self._is_open:
            self._is_open = False
            os.close(self.fd)


class Probe:
    """Asks the daemon for a sign of life: a match of nothing, which changes nothing."""

    def __init__(self, link: Link, waker: Waker) -> None:
        self._link = link
        self._waker = waker
        self._future: grpc.CallFuture[pb.MatchResponse] | None = None
        self._backoff = _backoff(link)
        self._next_at = 0.0  # Monotonic seconds.

    def advance(self, session: OpenSession) -> bool:
        """Start a probe or read its answer; True when the daemon has answered.

        Raises SessionEnded when the daemon does not know the session any more.
        """
        now = self._link.clock.now()
        if self._future is None:
            if now >= self._next_at:
                self._start(session)
            return False
        if not self._future.done():
            return False
        future, self._future = self._future, None
        code, details = future.code(), future.details()
        if code is grpc.StatusCode.UNAUTHENTICATED:
            raise SessionEnded("the daemon does not know our session")
        no_answer = code in _NO_ANSWER and named_error(details) is None
        if no_answer:
            self._next_at = now + self._backoff.next_seconds()
            return False
        self._backoff.reset()
        return True

    @property
    def wait_seconds(self) -> float:
        """How long to sleep before `advance` has something to do; a wake comes earlier."""
        if self._future is not None:
            return self._link.settings.probe_timeout_seconds
        return max(0.0, self._next_at - self._link.clock.now())

    def cancel(self) -> None:
        if self._future is not None:
            cancel(self._future)
            self._future = None

    def _start(self, session: OpenSession) -> None:
        self._future = session.rpc.over_grpc(calls.MATCH).future(
            pb.MatchRequest(token=session.token),
            timeout=self._link.settings.probe_timeout_seconds,
        )
        self._future.add_done_callback(lambda _: self._waker.wake())


_NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


class SessionKeeper:
    """Runs a door for a link, in its own thread, until the link closes."""

    def __init__(self, link: Link, door: Door, waker: Waker) -> None:
        self._link = link
        self._door = door
        self._waker = waker
        self._thread = threading.Thread(target=self._run, name="kvtier-session", daemon=True)
        self._has_logged_absence = False
        link.wake = waker.wake

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The link is closing: say Bye, end the thread."""
        self._door.interrupt()
        self._thread.join(JOIN_SECONDS)
        if not self._thread.is_alive():
            self._waker.close()

    def close_in_child(self) -> None:
        self._door.close_in_child()
        self._waker.close_in_child()

    # ------------------------------------------------------------------------------------ helpers

    def _run(self) -> None:
        try:
            self._keep()
        except BaseException:
            # Our own mistake: the engine goes on without kvtier.
            logger.exception("the session's thread failed; this client stays unavailable")
            self._link.session_lost("the session's thread failed")
            self._link.arenas.end_kept()
            self._link.start_closing()
            raise

    def _keep(self) -> None:
        backoff = _backoff(self._link)
        seen_at = self._link.clock.now()
        while not self._link.is_closing():
            opened_at = self._link.clock.now()
            if opened_at - seen_at > KEPT_ABSENT_SECONDS:
                self._link.arenas.end_kept()
            try:
                self._link.session_opened(self._door.open())
                try:
                    self._serve()
                finally:
                    seen_at = self._link.clock.now()
            except (OSError, KVTierError) as error:
                self._log_absence(error)
                self._link.session_lost(f"{type(error).__name__}: {error}")
            else:
                self._link.session_lost("the session is being replaced")
            finally:
                # Copies under way would outlive a Bye: then the end of the process is the proof.
                is_drained = not self._link.arenas.is_in_use
                self._door.close(orderly=self._link.is_closing() and is_drained)
            if self._link.clock.now() - opened_at > self._link.settings.retry_seconds_max:
                backoff.reset()
            self._pause(backoff.next_seconds())
        self._link.arenas.end_kept()

    def _serve(self) -> None:
        """Returns when the client closes or the session must be replaced."""
        probe = Probe(self._link, self._waker)
        try:
            while not self._link.is_closing():
                session = self._link.current
                state = self._link.breaker
                if session is None or state is BreakerState.ABSENT:
                    return
                self._door.advance()
                if state is not BreakerState.CLOSED and probe.advance(session):
                    self._has_logged_absence = False
                    self._link.probe_answered(session)
                    continue
                if self._wait(self._wait_seconds(probe, state)):
                    self._door.receive()
        finally:
            probe.cancel()

    def _wait_seconds(self, probe: Probe, state: BreakerState) -> float | None:
        waits = [self._door.due_seconds]
        if state is not BreakerState.CLOSED:
            waits.append(probe.wait_seconds)
        return min((one for one in waits if one is not None), default=None)

    def _wait(self, seconds: float | None) -> bool:
        """Sleep until something happens; True when the door has something to receive."""
        poller = select.poll()
        poller.register(self._waker.fd, select.POLLIN)
        door_fd = self._door.fileno()
        if door_fd is not None:
            wanted = select.POLLIN | (select.POLLOUT if self._door.has_unsent else 0)
            poller.register(door_fd, wanted)
        ready = dict(poller.poll(None if seconds is None else 1 + seconds * 1000))
        self._waker.drain()
        return bool(ready.get(door_fd, 0) & ~select.POLLOUT) if door_fd is not None else False

    def _pause(self, seconds: float) -> None:
        deadline = self._link.clock.now() + seconds
        poller = select.poll()
        poller.register(self._waker.fd, select.POLLIN)
        while not self._link.is_closing() and (left := deadline - self._link.clock.now()) > 0:
            poller.poll(1 + left * 1000)
            self._waker.drain()

    def _log_absence(self, error: Exception) -> None:
        """Once an outage: engines without a daemon are no news."""
        if not self._has_logged_absence and not self._link.is_closing():
            self._has_logged_absence = True
            logger.info("no session with the daemon: %s: %s", type(error).__name__, error)


def _backoff(link: Link) -> Backoff:
    settings = link.settings
    return Backoff(settings.retry_seconds_min, settings.retry_seconds_max, settings.jitter)
