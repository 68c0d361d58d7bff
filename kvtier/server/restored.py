"""Sessions of the life before: how they are written down, and how the core learns of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvtier.core.engines import ProcessState, Session
from kvtier.core.events import ProcessDied, SessionEnded, SessionLost, SessionOpened
from kvtier.server.inventory import ParkedSession
from kvtier.server.security import Caller, Peer, Rights
from kvtier.types import EngineId, Role, SessionId


class NoLink:
    """In place of the connection of a session that was open in the life before."""

    is_closed = True

    def send(self, data: bytes, fd: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass


class Record(Protocol):
    """What the books on sessions add."""

    @property
    def name(self) -> str: ...
    @property
    def caller(self) -> Caller: ...
    @property
    def replaces(self) -> SessionId | None: ...
    @property
    def replaced_by(self) -> SessionId | None: ...
    @property
    def pidfd_name(self) -> str: ...


def parked_session(one: Session, record: Record | None) -> ParkedSession:
    """`record`: None when the books have forgotten it and the core has not."""
    return ParkedSession(
        session=one.session,
        engine=one.engine.hex(),
        role=one.role.name,
        shards=one.shards,
        by_value=one.by_value,
        process=one.process.first_session,
        state=one.process.state.name,
        client="" if record is None else record.name,
        token="" if record is None else record.caller.token.hex(),
        replaces=0 if record is None else record.replaces or 0,
        replaced_by=0 if record is None else record.replaced_by or 0,
        pidfd="" if record is None else record.pidfd_name,
        tenant=one.tenant,
        uid=-1 if record is None or record.caller.peer.uid is None else record.caller.peer.uid,
    )


def parked_peer(one: ParkedSession) -> Peer:
    """Whose the session was; it calls no more, so its rights are of no use."""
    return Peer(one.tenant, None if one.uid < 0 else one.uid, Rights.READER)


def restored_events(
    parked: Sequence[ParkedSession],
) -> Iterator[SessionOpened | SessionLost | SessionEnded | ProcessDied]:
    """All of them are opened and lost again; processes proven dead, or gone, are so still."""
    ordered = sorted(parked, key=lambda one: one.session)
    newest: dict[int, ParkedSession] = {}
    for one in ordered:
        before = newest.get(one.process)
        yield SessionOpened(
            session=SessionId(one.session),
            engine=EngineId(bytes.fromhex(one.engine)),
            role=Role[one.role],
            shards=one.shards,
            by_value=one.by_value,
            replaces=None if before is None else SessionId(before.session),
            tenant=one.tenant,
        )
        newest[one.process] = one
    for one in newest.values():
        if one.state == ProcessState.DEAD.name:
            yield ProcessDied(SessionId(one.session))
        elif one.state == ProcessState.ENDED.name:
            yield SessionEnded(SessionId(one.session))
        else:
            yield SessionLost(SessionId(one.session))
