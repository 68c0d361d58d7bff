"""What a caller may handle, named by what the caller should do.

Every error that crosses a process boundary keeps its class name: gRPC details and session errors
begin with it, and `error_named` turns it back into the class.
"""

from __future__ import annotations


class KVTierError(Exception):
    """Base of all errors that kvtier raises on purpose."""


class BadRequest(KVTierError):
    """The request itself is wrong: mend the caller. Nothing was changed."""


class BadFrame(BadRequest):
    """A packet on the session socket that is no frame, or not one allowed now."""


class ProtocolMismatch(BadRequest):
    """Client and daemon are more than one protocol version apart: upgrade the older one."""


class ClockUncertain(KVTierError):
    """The handshake took too long to compare the two clocks: connect again."""


class ConfigError(KVTierError):
    """A mistake in the configuration; the message names the option and what it may be."""


class Unauthenticated(KVTierError):
    """No session has this token: connect again."""


class Forbidden(KVTierError):
    """The session may not do this: its role or its tenant says so."""


class UnknownNamespace(KVTierError):
    """The namespace id is not of this life of the daemon: open the namespace again."""


class NotReserved(BadRequest):
    """A slot that this session has not reserved (or has ended already); nothing was changed."""


class TierFull(KVTierError):
    """No free slots; nothing was changed. Evict, or refuse the offload."""


class LimitExceeded(KVTierError):
    """A limit of the daemon was reached; the message names it. Try again later or ask for less."""


class Draining(KVTierError):
    """The daemon is shutting down: carry on without it and reconnect later."""


class CorruptReplica(KVTierError):
    """Checksum mismatch: the replica has been dropped; treat it as a miss."""


class StaleSlot(KVTierError):
    """The slot belongs to another generation, session or slab: its bytes mean nothing."""


class Unavailable(KVTierError):
    """The daemon did not answer in time, or is not there: go on without it."""


class FdPassingUnavailable(KVTierError):
    """File descriptors cannot be passed here: use put and get by value."""


class IllegalTransition(AssertionError):
    """A replica was asked to change state against the table: our own mistake."""


def error_named(name: str) -> type[KVTierError]:
    """The error class called `name`, or KVTierError when there is none."""
    return _BY_NAME.get(name, KVTierError)


def _all_subclasses(root: type[KVTierError]) -> list[type[KVTierError]]:
    found = [root]
    for child in root.__subclasses__():
        found.extend(_all_subclasses(child))
    return found


_BY_NAME = {error.__name__: error for error in _all_subclasses(KVTierError)}
