"""Engines, their processes and sessions; and quarantine.

A *session* is one connection of one process under its engine's id. When a session ends, what it
reserved may still be written to: by its own process (if that is not proven dead) and by the
engine's other processes, which were told to copy. So its slots go into quarantine until its own
process and every process of the engine that maps slots is *quiet* about that session (it says that
its copies are drained and that it refuses later ones) or proven dead, plus a grace time for DMA
under way. Its own process counts even when it maps nothing: as long as it does not know that its
session ended, it may tell a worker that joins tomorrow to copy. A process that was not connected
when it should have been asked is asked when it is.

Invariant: a quarantine waits only for processes that are LIVE or LOST.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kvtier.core.events import SessionOpened
from kvtier.errors import Forbidden, Unauthenticated
from kvtier.types import EngineId, NamespaceId, Role, SessionId

DAEMON_SESSION = SessionId(0)
"""The daemon's own session, for put and get: belongs to no engine, always open."""


class ProcessState(Enum):
    LIVE = auto()
    LOST = auto()  # Its connection ended; nothing is known of the process.
    ENDED = auto()  # It said goodbye with its copies drained.
    DEAD = auto()


@dataclass(slots=True)
class Process:
    first_session: SessionId
    engine: EngineId
    maps_slots: bool
    state: ProcessState = ProcessState.LIVE
    current: SessionId | None = None
    harmless_at: float = 0.0  # When DMA of a dead process has ended too.

    @property
    def may_touch_slots(self) -> bool:
        return self.maps_slots and self.state in (ProcessState.LIVE, ProcessState.LOST)


@dataclass(slots=True)
class Session:
    session: SessionId
    engine: EngineId
    role: Role
    shards: tuple[int, ...]
    by_value: bool
    process: Process
    node: int | None = None  # The NUMA node nearest to its device.
    tenant: str = ""
    live: bool = True
    namespaces: dict[NamespaceId, None] = field(default_factory=dict)

    @property
    def maps_slots(self) -> bool:
        return self.live and self.process.maps_slots

    @property
    def may_hold_slots(self) -> bool:
        return not self.by_value and self.role is not Role.TOOL


@dataclass(slots=True)
class Quarantine:
    about: SessionId
    engine: EngineId
    waiting: dict[SessionId, Process]  # By the process's first session.
    ready_at: float
    asked: dict[SessionId, SessionId] = field(default_factory=dict)  # Process -> session it had.


@dataclass(frozen=True, slots=True)
class QuietAsked:
    """The process behind `session` is asked to be quiet about `about`."""

    session: SessionId
    about: SessionId


class EngineTable:
    """All sessions, and the quarantines of those that ended."""

    def __init__(self, *, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._sessions: dict[SessionId, Session] = {}
        self._processes: dict[EngineId, dict[SessionId, Process]] = {}
        self._quarantines: dict[SessionId, Quarantine] = {}

    # ------------------------------------------------------------------------------- questions

    def get(self, session: SessionId) -> Session | None:
        return self._sessions.get(session)

    def require_live(self, session: SessionId) -> Session:
        found = self._sessions.get(session)
        if found is None or not found.live:
            raise Unauthenticated(f"session {session} has ended: connect again")
        return found

    def require_slots(self, session: SessionId, namespace: NamespaceId) -> Session:
        """A live session that may use slots of the namespace."""
        found = self.require_live(session)
        if not found.may_hold_slots:
            raise Forbidden("this session maps no slots: use Put and Get")
        if namespace not in found.namespaces:
            raise Forbidden(f"this session has not opened namespace {namespace}: open it first")
        return found

    def sessions_of_process(self, session: SessionId) -> list[SessionId]:
        """All sessions, ended ones too, of the process behind `session`."""
        process = self._sessions[session].process
        return [one.session for one in self._sessions.values() if one.process is process]

    def sessions(self) -> list[Session]:
        return list(self._sessions.values())

    def node_of(self, session: SessionId) -> int | None:
        """The NUMA node nearest to the device of this session's engine, as far as its workers have
        said; of several workers the first one's."""
        mine = self._sessions.get(session)
        if mine is None:
            return None
        nodes = (
            one.node
            for one in self._sessions.values()
            if one.live and one.engine == mine.engine and one.node is not None
        )
        return next(nodes, None)

    def scheduler_count(self, tenant: str) -> int:
        """The tenant's live sessions that reserve slots ahead: tools and mere workers never do."""
        return sum(
            session.live
            and session.tenant == tenant
            and session.may_hold_slots
            and session.role is not Role.WORKER
            for session in self._sessions.values()
        )

    def may_write_late(self, session: SessionId, now: float) -> bool:
        """Whether DMA into the session's slots may be under way although nobody maps them: its
        engine has lost a process a moment ago, or nobody knows the session."""
        found = self._sessions.get(session)
        return found is None or any(
            one.harmless_at > now for one in self._processes[found.engine].values()
        )

    def is_quarantined(self, session: SessionId) -> bool:
        return session in self._quarantines

    def is_engine_gone(self, engine: EngineId) -> bool:
        """Whether every process of the engine is proven dead or has said goodbye."""
        return not any(
            process.state in (ProcessState.LIVE, ProcessState.LOST)
            for process in self._processes.get(engine, {}).values()
        )

    def next_ready(self) -> float | None:
        """When the next quarantine ends by time alone."""
        times = [one.ready_at for one in self._quarantines.values() if not one.waiting]
        return min(times, default=None)

    # --------------------------------------------------------------------------------- changes

    def open(self, opened: SessionOpened) -> None:
        """A new session, of a new process or of the one behind `replaces`."""
        session, engine = opened.session, opened.engine
        assert session not in self._sessions, f"session {session} opened twice"
        maps_slots = opened.role in (Role.WORKER, Role.BOTH) and not opened.by_value
        old = self._sessions.get(opened.replaces) if opened.replaces is not None else None
        if old is not None and old.engine == engine and old.process.state in _REVIVABLE:
            process = old.process
            process.state = ProcessState.LIVE
            begins_to_map = maps_slots and not process.maps_slots
            process.maps_slots = process.maps_slots or maps_slots
        else:
            process = Process(session, engine, maps_slots)
            self._processes.setdefault(engine, {})[session] = process
            begins_to_map = maps_slots
        process.current = session
        self._sessions[session] = Session(
            session,
            engine,
            opened.role,
            opened.shards,
            opened.by_value,
            process,
            opened.node,
            opened.tenant,
        )
        if begins_to_map:
            # A scheduler that does not know yet that its session ended may instruct it too.
            for one in self._quarantines.values():
                if one.engine == engine:
                    one.waiting[process.first_session] = process

    def end_session(self, session: SessionId, now: float) -> list[QuietAsked]:
        """The session is over, its process may live on: its slots go into quarantine."""
        found = self._sessions.get(session)
        if found is None or not found.live:
            return []
        found.live = False
        process = found.process
        if process.current == session:
            process.current = None
            if process.state is ProcessState.LIVE:
                process.state = ProcessState.LOST
        processes = self._processes[found.engine]
        waiting = {first: one for first, one in processes.items() if one.may_touch_slots}
        if found.may_hold_slots and process.state in _REVIVABLE:
            waiting[process.first_session] = process
        ready_at = max([now, *(one.harmless_at for one in processes.values())])
        self._quarantines[session] = Quarantine(session, found.engine, waiting, ready_at)
        return self.ask_again()

    def end_process(self, session: SessionId, now: float, *, dead: bool) -> list[QuietAsked]:
        """The process behind `session` is proven dead, or (not `dead`) has said goodbye."""
        found = self._sessions.get(session)
        if found is None:
            return []
        process = found.process
        process.state = ProcessState.DEAD if dead else ProcessState.ENDED
        if dead and process.maps_slots:
            process.harmless_at = now + self._grace_seconds
        asked: list[QuietAsked] = []
        for other in self._sessions.values():
            if other.process is process and other.live:
                asked.extend(self.end_session(other.session, now))
        for one in self._quarantines.values():
            if one.engine == found.engine:
                one.waiting.pop(process.first_session, None)
                one.ready_at = max(one.ready_at, process.harmless_at)
        return asked

    def ask_again(self) -> list[QuietAsked]:
        """Whom to ask to be quiet who was not asked yet under its present session.

        The process of an ended session is asked too: it may not know of a session whose opening it
        never heard the answer to.
        """
        found: list[QuietAsked] = []
        for quarantine in self._quarantines.values():
            for first, process in quarantine.waiting.items():
                current = process.current
                if current is not None and quarantine.asked.get(first) != current:
                    quarantine.asked[first] = current
                    found.append(QuietAsked(current, quarantine.about))
        return found

    def declare_quiet(self, session: SessionId, about: SessionId) -> None:
        """The process of `session` touches no slot under `about` any more."""
        found = self._sessions.get(session)
        quarantine = self._quarantines.get(about)
        # A lost process is waited for whatever it said: it may be told to copy again.
        if found is None or not found.live or quarantine is None:
            return
        if found.engine == quarantine.engine:
            quarantine.waiting.pop(found.process.first_session, None)

    def take_finished(self, now: float) -> list[SessionId]:
        """Sessions whose quarantine is over; each is returned once."""
        finished = [
            one.about
            for one in self._quarantines.values()
            if not one.waiting and one.ready_at <= now
        ]
        for about in finished:
            del self._quarantines[about]
        return finished

    def forget(self, session: SessionId) -> None:
        """Drop a session whose quarantine is over; and its process and engine with the last."""
        found = self._sessions.pop(session, None)
        if found is None:
            return
        process = found.process
        if any(other.process is process for other in self._sessions.values()):
            return
        processes = self._processes[found.engine]
        processes.pop(process.first_session, None)
        if not processes:
            del self._processes[found.engine]

    def check_invariants(self) -> list[str]:
        found = [
            f"quarantine {one.about} waits for a process that is gone"
            for one in self._quarantines.values()
            for process in one.waiting.values()
            if process.state not in _REVIVABLE
        ]
        found.extend(
            f"session {session.session} ended without quarantine"
            for session in self._sessions.values()
            if not session.live and session.session not in self._quarantines
        )
        return found


_REVIVABLE = (ProcessState.LIVE, ProcessState.LOST)
