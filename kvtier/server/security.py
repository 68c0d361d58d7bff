"""Who may call what: tokens, roles, and what each RPC asks for.

Invariants: a token works from the moment its session opened until that session is lost, replaced or
ended, and never again; and for the session's own user, through the socket that it was opened at.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, auto

from kvtier.errors import Forbidden, Unauthenticated
from kvtier.types import Role, SessionId

TOKEN_BYTES = 32


class Rights(IntEnum):
    """What a client may do at most; the kernel's word for its user decides. Each has those before
    it."""

    READER = 1
    ENGINE = 2
    ADMIN = 3
    OPERATOR = 4  # Of the whole daemon.


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a connection."""

    tenant: str = ""  # Whose socket it came through.
    uid: int | None = None  # None: nobody can tell.
    rights: Rights = Rights.OPERATOR
    certificate: str = ""  # By which it is known, as the configuration names it; of TCP alone.


class Form(Enum):
    """What kind of session a call needs."""

    ANY = auto()
    CONNECTED = auto()  # One of the session socket, or of Greet with a certificate.
    HOLDER = auto()  # The scheduler process of an engine: it holds slots and leases.


@dataclass(frozen=True, slots=True)
class Access:
    """What an RPC asks of its caller; with `form` None no session: it opens one."""

    rights: Rights
    form: Form | None


_LOOK = Access(Rights.READER, Form.ANY)
_READ_BOOKS = Access(Rights.READER, Form.CONNECTED)
_USE = Access(Rights.ENGINE, Form.ANY)
_HOLD = Access(Rights.ENGINE, Form.HOLDER)
_ADMINISTRATE = Access(Rights.ADMIN, Form.CONNECTED)
_OPERATE = Access(Rights.OPERATOR, Form.CONNECTED)

ACCESS: Mapping[str, Access] = {
    "Greet": Access(Rights.READER, None),
    "Match": _LOOK,
    "Acquire": _HOLD,
    "Release": Access(Rights.ENGINE, Form.CONNECTED),  # Tools end their pins with it.
    "Reserve": _HOLD,
    "Commit": _HOLD,
    "Abort": _HOLD,
    "Prefetch": _USE,
    "Put": _USE,
    "Get": _LOOK,
    "Hint": _USE,
    "Evict": _ADMINISTRATE,
    "Pin": _ADMINISTRATE,
    "Clear": _ADMINISTRATE,
    "Purge": _ADMINISTRATE,
    "Drain": _OPERATE,
    "Check": _OPERATE,
    "Explain": _READ_BOOKS,
    "List": _READ_BOOKS,
    "Stats": _LOOK,
    "Watch": _LOOK,
}

_ENGINE_ROLES = (Role.SCHEDULER, Role.BOTH)


@dataclass(slots=True)
class Caller:
    """The session behind a token."""

    session: SessionId
    role: Role
    by_value: bool  # Passes no fds: it may be a Greet session, or one of the session socket.
    greeted: bool  # Opened by Greet: ends when it is not used for a while.
    token: bytes
    used_at: float
    peer: Peer = Peer()

    @property
    def tenant(self) -> str:
        return self.peer.tenant


class Tokens:
    """Token -> caller. A dict compares hashes first; 32 random bytes leave nothing to time."""

    def __init__(self) -> None:
        self._callers: dict[bytes, Caller] = {}

    def issue(
        self,
        session: SessionId,
        role: Role,
        peer: Peer = Peer(),  # Frozen.
        *,
        by_value: bool,
        greeted: bool,
        now: float,
    ) -> Caller:
        token = secrets.token_bytes(TOKEN_BYTES)
        caller = Caller(session, role, by_value, greeted, token, now, peer)
        self._callers[token] = caller
        return caller

    def revoke(self, token: bytes) -> None:
        """The token stops working; revoking it twice changes nothing."""
        self._callers.pop(token, None)

    def caller(
        self,
        token: bytes,
        access: Access,
        origin: Peer | None = None,
        *,
        now: float,
    ) -> Caller:
        """Who calls. `origin`: who is at the other end of the connection that the call came by;
        None where that is whoever has the token. Raises Unauthenticated or Forbidden."""
        caller = self._callers.get(token)
        if caller is None:
            raise Unauthenticated("no open session has this token: connect again")
        if origin is not None:
            check_origin(caller.peer, origin)
            check_rights(origin, access)  # It may have fewer than when the session began.
        caller.used_at = now
        check_rights(caller.peer, access)
        if access.form is Form.HOLDER:
            if caller.role not in _ENGINE_ROLES or caller.by_value:
                raise Forbidden(f"{_describe(caller)} may hold no slots: use Put and Get")
        elif access.form is Form.CONNECTED and caller.greeted and not caller.peer.certificate:
            raise Forbidden("a Greet session may not administrate: use the session socket")
        return caller

    def greeted_before(self, instant: float) -> list[Caller]:
        """Sessions opened by Greet and not used since `instant`."""
        return [
            caller
            for caller in self._callers.values()
            if caller.greeted and caller.used_at < instant
        ]

    def greeted_count(self, tenant: str | None = None) -> int:
        """Of one tenant, or of all."""
        return sum(
            caller.greeted and tenant in (None, caller.tenant) for caller in self._callers.values()
        )

    def __len__(self) -> int:
        return len(self._callers)


def check_origin(owner: Peer, origin: Peer) -> None:
    """Raises Forbidden where a session's token, or its name, is used by somebody else than its
    owner."""
    if owner.tenant != origin.tenant:
        raise Forbidden("this token is of a session of another socket: connect to this one")
    if owner.certificate != origin.certificate:
        raise Forbidden("this token is of another certificate's session: connect yourself")
    if None not in (owner.uid, origin.uid) and owner.uid != origin.uid:
        raise Forbidden("this token is of another user's session: connect yourself")


def check_rights(peer: Peer, access: Access) -> None:
    """Raises Forbidden."""
    if peer.rights < access.rights:
        raise Forbidden(f"this needs {_NEEDED[access.rights]}: you are {_HAVE[peer.rights]}")


_NEEDED = {
    Rights.ENGINE: "the rights of an engine (uids or gids of the tenant)",
    Rights.ADMIN: "an administrator (admins of the tenant)",
    Rights.OPERATOR: "the operator: connect to server.socket",
}
_HAVE = {
    Rights.READER: "a reader",
    Rights.ENGINE: "an engine",
    Rights.ADMIN: "an administrator of one tenant",
}


def _describe(caller: Caller) -> str:
    if caller.by_value:
        return "a by-value session"
    return f"a session of role {caller.role.name}"
