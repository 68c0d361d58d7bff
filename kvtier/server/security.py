"""Who may call what: tokens, roles, and what each RPC asks for.

Invariant: a token works from the moment its session opened until that session is lost, replaced or
ended, and never again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from kvtier.errors import Forbidden, Unauthenticated
from kvtier.types import Role, SessionId

TOKEN_BYTES = 32


class Access(Enum):
    """What an RPC asks of its caller."""

    ANYONE = auto()  # The handshake.
    SESSION = auto()  # Any session, by value too.
    ENGINE = auto()  # The scheduler process of an engine: it holds slots and leases.
    ADMIN = auto()  # Any session of the session socket; not by value.


ACCESS: Mapping[str, Access] = {
    "Greet": Access.ANYONE,
    "Match": Access.SESSION,
    "Acquire": Access.ENGINE,
    "Release": Access.ADMIN,  # Tools end their pins with it.
    "Reserve": Access.ENGINE,
    "Commit": Access.ENGINE,
    "Abort": Access.ENGINE,
    "Prefetch": Access.SESSION,
    "Put": Access.SESSION,
    "Get": Access.SESSION,
    "Hint": Access.SESSION,
    "Evict": Access.ADMIN,
    "Pin": Access.ADMIN,
    "Clear": Access.ADMIN,
    "Drain": Access.ADMIN,
    "Check": Access.ADMIN,
    "Explain": Access.ADMIN,
    "List": Access.ADMIN,
    "Stats": Access.SESSION,
    "Watch": Access.SESSION,
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


class Tokens:
    """Token -> caller. A dict compares hashes first; 32 random bytes leave nothing to time."""

    def __init__(self) -> None:
        self._callers: dict[bytes, Caller] = {}

    def issue(
        self, session: SessionId, role: Role, *, by_value: bool, greeted: bool, now: float
    ) -> Caller:
        token = secrets.token_bytes(TOKEN_BYTES)
        caller = Caller(session, role, by_value, greeted, token, now)
        self._callers[token] = caller
        return caller

    def revoke(self, token: bytes) -> None:
        """The token stops working; revoking it twice changes nothing."""
        self._callers.pop(token, None)

    def caller(self, token: bytes, access: Access, *, now: float) -> Caller:
        """Raises Unauthenticated or Forbidden."""
        caller = self._callers.get(token)
        if caller is None:
            raise Unauthenticated("no open session has this token: connect again")
        caller.used_at = now
        if access is Access.ENGINE:
            if caller.role not in _ENGINE_ROLES or caller.by_value:
                raise Forbidden(f"{_describe(caller)} may hold no slots: use Put and Get")
        elif access is Access.ADMIN and caller.greeted:
            raise Forbidden("a Greet session may not administrate: use the session socket")
        return caller

    def greeted_before(self, instant: float) -> list[Caller]:
        """Sessions opened by Greet and not used since `instant`."""
        return [
            caller
            for caller in self._callers.values()
            if caller.greeted and caller.used_at < instant
        ]

    @property
    def greeted_count(self) -> int:
        return sum(caller.greeted for caller in self._callers.values())

    def __len__(self) -> int:
        return len(self._callers)


def _describe(caller: Caller) -> str:
    if caller.by_value:
        return "a by-value session"
    return f"a session of role {caller.role.name}"
