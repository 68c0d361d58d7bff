"""What the faces of a client, its session's thread and its handlers share.

Calls read `session` and the breaker without a lock (each is replaced as a whole) and report what
went wrong; the session's thread reports what the daemon said. Invariants:

  (0) Calls pass only while the breaker is CLOSED.
  (1) A session that is lost or suspect is refused by the arenas before anybody hears of it.
  (2) Quiet about a session is queued only after every quiet handler has returned and no hold
      under it is open.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import grpc

from kvtier.client import calls, codec
from kvtier.client.arena import ArenaTable
from kvtier.client.breaker import BreakerEvent, BreakerState, next_breaker_state
from kvtier.client.callbacks import Callbacks
from kvtier.client.forks import check_not_forked
from kvtier.client.rpc import Rpc
from kvtier.client.settings import ClientSettings
from kvtier.client.values import Namespace, NamespaceState, SessionRef
from kvtier.clock import Clock
from kvtier.errors import KVTierError, LimitExceeded, Unauthenticated, Unavailable
from kvtier.namespace import NamespaceSpec
from kvtier.v1 import kvtier_pb2 as pb

logger = logging.getLogger("kvtier.client")

QuietHandler = Callable[[SessionRef], None]
RecallHandler = Callable[[Namespace, int], None]

# Each namespace is opened again at every reconnect; an engine has one, a hybrid model a few.
NAMESPACE_COUNT_MAX = 256
HANDLER_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class OpenSession:
    """What SessionOpened or Greet said; replaced as a whole."""

    ref: SessionRef
    token: bytes = field(repr=False)
    by_value: bool
    by_value_reason: str
    lease_ns_max: int
    grpc_address: str
    rpc: Rpc = field(repr=False, compare=False)
    keeps_memory: bool = False  # Slabs stay mapped when the connection breaks.


class Link:
    """The connection's state, safe to use from every thread."""

    def __init__(self, settings: ClientSettings, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.arenas = ArenaTable()
        self.callbacks = Callbacks()
        self.wake: Callable[[], None] = lambda: None  # Set by the session's thread.
        self._owner_pid = os.getpid()
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._breaker = BreakerState.ABSENT
        self._session: OpenSession | None = None
        self._why_absent = "no daemon yet"
        self._closing = False
        self._namespaces: dict[bytes, Namespace] = {}
        self._quiet_handlers: list[QuietHandler] = []
        self._recall_handler: RecallHandler | None = None
        self._quiet_begun: set[SessionRef] = set()  # Being drained, or quiet already.
        self._quiet_done: set[SessionRef] = set()
        self._quiet_told: dict[int, SessionRef] = {}  # Quiet, until the daemon acknowledges.
        self._has_warned = False

    # ------------------------------------------------------------------------------------ calls

    def begin_any(self) -> OpenSession:
        """The session to call under. Raises Unavailable at once when there is none."""
        check_not_forked(self._owner_pid)
        session = self._session
        if self._breaker is not BreakerState.CLOSED or session is None:
            raise Unavailable(f"not calling the daemon: {self._breaker.name}, {self._why_absent}")
        return session

    def begin(self, namespace: Namespace) -> tuple[OpenSession, NamespaceState]:
        check_not_forked(self._owner_pid)
        if (error := namespace.error) is not None and not self._closing:
            raise error  # Also while the breaker is not CLOSED: waiting does not help.
        session = self.begin_any()
        state = namespace.state
        if state is None or state.session != session.ref:
            raise Unavailable("the namespace is still being opened")
        return session, state

    def failed(
        self, session: OpenSession, changes_state: bool, code: grpc.StatusCode, details: str | None
    ) -> KVTierError:
        """What to raise for a failed call; the breaker learns of it."""
        error = codec.error_of(code, details)
        if isinstance(error, Unavailable) and codec.named_error(details) is None:
            self.missed(session, changes_state)  # Else the daemon itself has said so.
        elif isinstance(error, Unauthenticated):
            self._move(session, BreakerEvent.SESSION_LOST)
        return error

    def missed(self, session: OpenSession, changes_state: bool) -> None:
        """A call got no answer; with `changes_state` nobody knows what it did."""
        event = BreakerEvent.EFFECT_UNKNOWN if changes_state else BreakerEvent.UNANSWERED
        self._move(session, event)

    def release_unheard(self, session: OpenSession, lease_id: int) -> None:
        """End a lease whose call ended without us; not in this thread, whose time is over."""
        self.callbacks.submit(lambda: self._release(session, lease_id))

    # ------------------------------------------------------------------------------- for the faces

    @property
    def session(self) -> OpenSession | None:
        """The session calls pass under now; None while the breaker is not CLOSED."""
        return self._session if self._breaker is BreakerState.CLOSED else None

    def is_closing(self) -> bool:
        return self._closing

    def open_namespace(self, spec: NamespaceSpec) -> Namespace:
        check_not_forked(self._owner_pid)
        spec.validate()
        with self._changed:
            fingerprint = spec.fingerprint()
            namespace = self._namespaces.get(fingerprint)
            if namespace is None:
                if len(self._namespaces) >= NAMESPACE_COUNT_MAX:
                    raise LimitExceeded(f"a client opens at most {NAMESPACE_COUNT_MAX} namespaces")
                namespace = Namespace(spec, about=len(self._namespaces) + 1)
                self._namespaces[fingerprint] = namespace
        self.wake()
        return namespace

    def is_open(self, namespace: Namespace) -> bool:
        """Whether calls on the namespace pass now."""
        session, state = self.session, namespace.state
        return session is not None and state is not None and state.session == session.ref

    def wait_until(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        check_not_forked(self._owner_pid)
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._closing, timeout_seconds)
            return condition()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """`listener` is called from any thread after each change; it must return at once."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.remove(listener)

    def add_quiet_handler(self, handler: QuietHandler) -> None:
        self._quiet_handlers.append(handler)

    def set_recall_handler(self, handler: RecallHandler | None) -> None:
        self._recall_handler = handler

    def start_closing(self) -> None:
        with self._changed:
            self._closing = True
            self._why_absent = "the client is closed"
            self._breaker = BreakerState.ABSENT
        self._tell()
        self.wake()

    # ------------------------------------------------------------------- for the session's thread

    @property
    def current(self) -> OpenSession | None:
        """The session, whether calls pass or not."""
        return self._session

    @property
    def breaker(self) -> BreakerState:
        return self._breaker

    @property
    def namespaces(self) -> list[Namespace]:
        with self._changed:
            return list(self._namespaces.values())

    def namespace_about(self, about: int) -> Namespace | None:
        return next((one for one in self.namespaces if one.about == about), None)

    def namespace_with_id(self, namespace_id: int) -> Namespace | None:
        for one in self.namespaces:
            if one.state is not None and one.state.namespace_id == namespace_id:
                return one
        return None

    def enter_generation(self, generation: int) -> None:
        """Everything of another generation is void, Quiet about it included."""
        self.arenas.enter_generation(generation)
        with self._changed:
            for session_id, ref in list(self._quiet_told.items()):
                if ref.generation != generation:
                    del self._quiet_told[session_id]
            self._quiet_begun = {ref for ref in self._quiet_begun if ref.generation == generation}
            self._quiet_done &= self._quiet_begun

    def session_opened(self, session: OpenSession) -> None:
        with self._changed:
            if self._closing:
                return
            self._session = session
            self._breaker = next_breaker_state(self._breaker, BreakerEvent.SESSION_OPENED)
            self._why_absent = "the daemon has not answered yet"
        if session.by_value:
            self._warn_by_value(session.by_value_reason)

    def session_lost(self, why: str) -> None:
        """The socket ended, or a suspect session is given up."""
        session = self._session
        if session is not None:
            self._move(session, BreakerEvent.SESSION_LOST)
        with self._changed:
            self._session = None
            if not self._closing:
                self._why_absent = why
            for namespace in self._namespaces.values():
                namespace.state = None
                namespace.error = None  # The next session asks anew.
        # Without a session, an attempt to open one has failed: what was kept for it still is.
        keeps = (session is None or session.keeps_memory) and not self._closing
        self.arenas.void_all(keeps=keeps)

    def probe_answered(self, session: OpenSession) -> None:
        self._move(session, BreakerEvent.ANSWERED)

    def namespace_opened(self, namespace: Namespace, state: NamespaceState) -> None:
        with self._changed:
            namespace.error = None
            namespace.state = state
        self._tell()

    def namespace_refused(self, namespace: Namespace, error: KVTierError) -> None:
        logger.error("the daemon refuses a namespace: %s: %s", type(error).__name__, error)
        with self._changed:
            namespace.state = None
            namespace.error = error
        self._tell()

    def fall_back_to_values(self, reason: str) -> None:
        """No descriptors come through: this session goes on with put and get."""
        with self._changed:
            if self._session is not None:
                self._session = replace(self._session, by_value=True, by_value_reason=reason)
        self._warn_by_value(reason)

    def slots_recalled(self, namespace_id: int, count: int) -> None:
        handler, namespace = self._recall_handler, self.namespace_with_id(namespace_id)
        if handler is not None and namespace is not None:
            self.callbacks.submit(lambda: handler(namespace, count))

    # -------------------------------------------------------------------------------------- quiet

    def begin_quiet(self, ref: SessionRef) -> None:
        """Refuse the session now; when all copies under it have ended, queue Quiet."""
        with self._changed:
            if ref in self._quiet_begun or ref.session_id == 0:
                return
            self._quiet_begun.add(ref)
        self.arenas.refuse(ref)
        self.callbacks.submit(lambda: self._drain(ref))

    def quiet_requested(self, ref: SessionRef) -> None:
        """The daemon asks, perhaps again: it may have missed what an earlier session told."""
        with self._changed:
            if ref in self._quiet_done:
                self._quiet_told[ref.session_id] = ref
        self.begin_quiet(ref)

    def quiets_to_send(self) -> list[int]:
        """Sessions the daemon has not yet acknowledged our Quiet about."""
        with self._changed:
            return list(self._quiet_told)

    def quiet_acknowledged(self, session_id: int) -> None:
        with self._changed:
            self._quiet_told.pop(session_id, None)

    def _drain(self, ref: SessionRef) -> None:
        for handler in list(self._quiet_handlers):
            while not self._handled(handler, ref):
                if self.wait_until(lambda: self._closing, HANDLER_RETRY_SECONDS):
                    return
        while not self.arenas.wait_quiet(ref, HANDLER_RETRY_SECONDS):
            if self._closing:
                return
        with self._changed:
            if ref in self._quiet_begun:  # Not of a generation that has ended meanwhile.
                self._quiet_done.add(ref)
                self._quiet_told[ref.session_id] = ref
        self.wake()

    def _handled(self, handler: QuietHandler, ref: SessionRef) -> bool:
        """False when the handler failed: copies may still run, so nobody may be told otherwise."""
        try:
            handler(ref)
        except Exception:
            logger.exception("a quiet handler failed; trying it again")
            return False
        return True

    # ------------------------------------------------------------------------------------ helpers

    def _release(self, session: OpenSession, lease_id: int) -> None:
        request = pb.ReleaseRequest(token=session.token, lease_ids=[lease_id])
        try:
            session.rpc.unary(calls.RELEASE)(request, timeout=self.settings.timeout_seconds)
        except grpc.RpcError as error:
            self.failed(session, True, error.code(), error.details())
        except ValueError:
            return  # gRPC's word for a channel that was closed with its session.

    def _move(self, session: OpenSession, event: BreakerEvent) -> None:
        with self._changed:
            current = self._session
            if current is None or session.token != current.token or self._closing:
                return  # It is about a session that is history.
            before = self._breaker
            self._breaker = next_breaker_state(before, event)
            if self._breaker is before:
                return
            self._why_absent = f"after {event.name}"
            is_void = self._breaker in (BreakerState.SUSPECT, BreakerState.ABSENT)
        if is_void:
            self.begin_quiet(session.ref)
        self._tell()
        self.wake()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
        for listener in list(self._listeners):
            listener()

    def _warn_by_value(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("no shared memory with the daemon; blocks travel by value: %s", reason)
