"""The books on sessions: who is connected, whose process lives, what each was offered.

One process may have several sessions, one after another: a newer one names the older and proves it
by its token. Invariants: a token works only while its session is live; the pidfd of a process is
watched by its newest session until the process is dead or has said Bye; every session that was
opened ends in exactly one of: replaced, process died, ended.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.clock import Clock
from kvtier.core.events import ProcessDied, SessionEnded, SessionLost, SessionOpened
from kvtier.core.instructions import AcknowledgeQuiet, RecallSlots, RequestQuiet
from kvtier.errors import LimitExceeded, Unauthenticated
from kvtier.server.core_loop import CoreLoop
from kvtier.server.inventory import ParkedSession
from kvtier.server.keeping import Keeper
from kvtier.server.link import Link
from kvtier.server.peers import PidfdWatch
from kvtier.server.restored import NoLink, parked_peer, parked_session, restored_events
from kvtier.server.security import Caller, Peer, Tokens, check_origin
from kvtier.types import EngineId, Role, SessionId, SlabId
from kvtier.v1 import kvtier_pb2 as pb

log = logging.getLogger(__name__)

GREETED_IDLE_SECONDS = 60.0


@dataclass(slots=True)
class SessionRecord:
    """One session of the session socket, from Hello until nothing of it is left."""

    id: SessionId
    engine: EngineId
    role: Role
    name: str
    by_value: bool
    caller: Caller
    link: Link | NoLink
    pidfd: int | None
    pidfd_name: str = ""  # That the process is parked under.
    offered: set[SlabId] = field(default_factory=set)
    knows_segments: bool = False  # See Hello.
    segments: set[int] = field(default_factory=set)  # Offered, and not answered yet.
    replaces: SessionId | None = None
    replaced_by: SessionId | None = None
    is_live: bool = True
    is_known: bool = False  # The client spoke under it: it has heard of this session.


@dataclass(frozen=True, slots=True)
class Opening:
    """What Hello said, checked."""

    engine: EngineId
    role: Role
    shards: tuple[int, ...]
    name: str
    by_value: bool
    old_session: SessionId | None
    old_token: bytes
    node: int | None = None  # The NUMA node nearest to a worker's device.
    knows_segments: bool = False
    peer: Peer = Peer()


class Sessions:
    """Lives on the event loop."""

    def __init__(
        self,
        core: CoreLoop,
        tokens: Tokens,
        pidfds: PidfdWatch,
        clock: Clock,
        *,
        sessions_max: int,
        keeper: Keeper | None = None,
    ) -> None:
        """`keeper`: with whom sessions are left that somebody may touch memory under."""
        self._keeper = Keeper() if keeper is None else keeper
        self._core = core
        self._tokens = tokens
        self._pidfds = pidfds
        self._clock = clock
        self.sessions_max = sessions_max
        self._records: dict[SessionId, SessionRecord] = {}
        self._next_id = 1  # 0 is the daemon's own session.
        self._kept_until = 0  # Lower numbers are not given by the next life.

    @property
    def used_count(self) -> int:
        """Of all tenants: live and lost ones, and those opened by Greet."""
        return len(self._records) + self._tokens.greeted_count()

    def used_count_of(self, tenant: str) -> int:
        """Of the tenant's `sessions_max`."""
        mine = sum(record.caller.tenant == tenant for record in self._records.values())
        return mine + self._tokens.greeted_count(tenant)

    @property
    def keeps_memory(self) -> bool:
        """Whether what is in memory outlives this daemon."""
        return self._keeper.is_on

    def get(self, session: SessionId) -> SessionRecord | None:
        return self._records.get(session)

    def live(self) -> list[SessionRecord]:
        return [record for record in self._records.values() if record.is_live]

    # --------------------------------------------------------------------------------- opening

    def open(self, opening: Opening, link: Link, pidfd: int | None) -> SessionRecord:
        """Open a session; takes `pidfd` over if it returns.

        Raises Unauthenticated, Forbidden or LimitExceeded.
        """
        old = self._old_record(opening)
        if old is None:
            self.require_room(opening.peer.tenant)
        caller = self._tokens.issue(
            self._new_id(),
            opening.role,
            opening.peer,
            by_value=opening.by_value,
            greeted=False,
            now=self._now(),
        )
        record = SessionRecord(
            id=caller.session,
            engine=opening.engine,
            role=opening.role,
            name=opening.name,
            by_value=opening.by_value,
            caller=caller,
            link=link,
            pidfd=pidfd,
            knows_segments=opening.knows_segments,
        )
        self._records[record.id] = record
        if old is not None:
            self._replace(old, record)
        self._core.post(
            SessionOpened(
                session=record.id,
                engine=record.engine,
                role=record.role,
                shards=opening.shards,
                by_value=record.by_value,
                replaces=record.replaces,
                node=opening.node,
                tenant=opening.peer.tenant,
            )
        )
        self._keep(record)
        self._watch(record)
        log.info("session opened", extra=_facts(record))
        return record

    def greet(self, peer: Peer) -> Caller:
        """Open a by-value session that ends when it was not used for a minute."""
        self.require_room(peer.tenant)
        caller = self._tokens.issue(
            self._new_id(), Role.TOOL, peer, by_value=True, greeted=True, now=self._now()
        )
        engine = EngineId(secrets.token_bytes(16))
        self._core.post(
            SessionOpened(caller.session, engine, Role.TOOL, by_value=True, tenant=peer.tenant)
        )
        return caller

    def expire_greeted(self) -> None:
        for caller in self._tokens.greeted_before(self._now() - GREETED_IDLE_SECONDS):
            self._tokens.revoke(caller.token)
            self._core.post(SessionEnded(caller.session))

    def require_room(self, tenant: str) -> None:
        if self.used_count_of(tenant) >= self.sessions_max:
            raise LimitExceeded(
                f"{self.sessions_max} sessions are open (server.sessions_max): close some, or "
                "raise the limit"
            )

    # ---------------------------------------------------------------------------------- ending

    def ended(self, record: SessionRecord) -> None:
        """The client said Bye: its copies are drained."""
        self._close(record)
        self._forget(record)
        self._core.post(SessionEnded(record.id))
        self.keep()
        log.info("session ended", extra=_facts(record))

    def lost(self, record: SessionRecord) -> None:
        """The connection is over without Bye; changes nothing for a session that ended already."""
        if not record.is_live:
            return
        never_heard_of = not record.is_known and record.replaces is None
        if record.pidfd is None or record.role is Role.TOOL or never_heard_of:
            # It holds nothing that anybody could write to. A client that hung up before it heard of
            # its first session cannot name it later: nobody would ever be quiet for it.
            self.ended(record)
            return
        self._close(record)
        self._core.post(SessionLost(record.id))
        self.keep()
        log.warning("session lost", extra=_facts(record))

    def confirm(self, record: SessionRecord) -> None:
        """The client uses this session: it will never name an older one again."""
        record.is_known = True
        while record.replaces is not None:
            old = self._records.pop(record.replaces)
            record.replaces = old.replaces

    def close(self) -> None:
        for record in self._records.values():
            record.link.close()
        self._pidfds.close()

    # ----------------------------------------------------------------- for the life after this one

    def keep(self) -> None:
        """Leave with the keeper what changed; from time to time too: quarantines end unseen."""
        if self._keeper.is_on:
            self._keeper.note_sessions(
                parked_session(one, self._records.get(one.session))
                for one in self._core.sessions()
                if one.role is not Role.TOOL
            )

    def revive(self, parked: Sequence[ParkedSession], session_next: int) -> None:
        """Sessions of the life before; their clients may come back and name them. All are lost."""
        self._next_id = max(self._next_id, session_next)
        for one in parked:
            if one.token:
                self._revive_record(one)
        for record in self._records.values():
            if record.replaces not in self._records:
                record.replaces = None
            if record.replaced_by not in self._records:
                record.replaced_by = None
        for event in restored_events(parked):
            self._core.post(event)
        for record in self._records.values():
            self._watch(record)

    def _revive_record(self, one: ParkedSession) -> None:
        session, role = SessionId(one.session), Role[one.role]
        token, peer = bytes.fromhex(one.token), parked_peer(one)
        caller = Caller(session, role, one.by_value, False, token, self._now(), peer)
        self._records[session] = SessionRecord(
            id=session,
            engine=EngineId(bytes.fromhex(one.engine)),
            role=role,
            name=one.client,
            by_value=one.by_value,
            caller=caller,
            link=NoLink(),
            pidfd=self._keeper.take(one.pidfd) if one.pidfd else None,
            pidfd_name=one.pidfd,
            replaces=SessionId(one.replaces) if one.replaces else None,
            replaced_by=SessionId(one.replaced_by) if one.replaced_by else None,
            is_live=False,
            is_known=True,
        )

    def _keep(self, record: SessionRecord) -> None:
        if record.pidfd is not None and not record.pidfd_name:
            record.pidfd_name = f"process-{record.id}"
            self._keeper.keep_process(record.pidfd_name, record.pidfd)
        self.keep()

    # ----------------------------------------------------------------------------- instructions

    def send(self, session: SessionId, frame: pb.DaemonFrame, fd: int | None = None) -> None:
        """To a session that may be gone already: then there is nobody to tell."""
        record = self._records.get(session)
        if record is not None and record.is_live:
            record.link.send(frame.SerializeToString(), fd)

    def on_request_quiet(self, instruction: RequestQuiet) -> None:
        asked = pb.QuietRequested(session_id=instruction.about)
        self.send(instruction.session, pb.DaemonFrame(quiet_requested=asked))

    def on_acknowledge_quiet(self, instruction: AcknowledgeQuiet) -> None:
        ack = pb.SessionQuietAck(session_id=instruction.about)
        self.send(instruction.session, pb.DaemonFrame(quiet_ack=ack))

    def on_recall_slots(self, instruction: RecallSlots) -> None:
        recalled = pb.SlotsRecalled(namespace_id=instruction.namespace, count=instruction.count)
        self.send(instruction.session, pb.DaemonFrame(slots_recalled=recalled))

    def check_invariants(self) -> list[str]:
        found = []
        for record in self._records.values():
            if record.is_live and record.link.is_closed and record.replaced_by is not None:
                found.append(f"session {record.id} is live and replaced")
            if record.replaced_by is not None and record.pidfd is not None:
                found.append(f"session {record.id} is replaced and still watches its process")
        return found

    # --------------------------------------------------------------------------------- helpers

    def _now(self) -> float:
        return self._clock.now()

    def _new_id(self) -> SessionId:
        found = SessionId(self._next_id)
        self._next_id += 1
        if found >= self._kept_until:
            self._kept_until = self._keeper.sessions_until(found)
        return found

    def _watch(self, record: SessionRecord) -> None:
        if record.pidfd is not None:
            self._pidfds.watch(record.pidfd, lambda: self._core.spawn(lambda: self._died(record)))

    def _old_record(self, opening: Opening) -> SessionRecord | None:
        """The newest session of the process that this client names and proves."""
        if opening.old_session is None:
            return None
        old = self._records.get(opening.old_session)
        if old is None:
            return None  # Its process was proven dead, or it ended: nothing to replace.
        if not secrets.compare_digest(old.caller.token, opening.old_token) or (
            old.engine != opening.engine
        ):
            raise Unauthenticated(
                f"old_token and engine_id are not those of session {old.id}: leave old_session_id 0"
            )
        check_origin(old.caller.peer, opening.peer)
        # The answer to a Hello in between may have been lost: that session counts as well.
        while old.replaced_by is not None:
            old = self._records[old.replaced_by]
        return old

    def _replace(self, old: SessionRecord, new: SessionRecord) -> None:
        self._close(old)
        old.replaced_by = new.id
        new.replaces = old.id
        new.pidfd_name, old.pidfd_name = old.pidfd_name, ""  # It is the same process.
        if old.pidfd is not None:
            if new.pidfd is None:
                new.pidfd = old.pidfd
                self._pidfds.release(old.pidfd)
            else:
                self._pidfds.forget(old.pidfd)
            old.pidfd = None

    def _close(self, record: SessionRecord) -> None:
        record.is_live = False
        self._tokens.revoke(record.caller.token)
        record.link.close()

    def _died(self, record: SessionRecord) -> None:
        record.pidfd = None  # Closed when it fired.
        self._close(record)
        self._forget(record)
        self._core.post(ProcessDied(record.id))
        self.keep()
        log.info("process died", extra=_facts(record))

    def _forget(self, record: SessionRecord) -> None:
        if record.pidfd is not None:
            self._pidfds.forget(record.pidfd)
            record.pidfd = None
        self.confirm(record)
        del self._records[record.id]

    def names(self) -> Iterable[tuple[SessionId, str]]:
        return [(record.id, record.name) for record in self._records.values()]

    def tenant_of(self, session: SessionId) -> str | None:
        """None for one that the books have forgotten."""
        record = self._records.get(session)
        return None if record is None else record.caller.tenant


def _facts(record: SessionRecord) -> dict[str, object]:
    return {
        "session": record.id,
        "tenant": record.caller.tenant or None,
        "uid": record.caller.peer.uid,
        "role": record.role.name.lower(),
        "client": record.name,
        "by_value": record.by_value,
        "replaces": record.replaces,
    }
