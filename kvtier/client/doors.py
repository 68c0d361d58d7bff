"""The two ways into the daemon: what opening and keeping a session takes on each.

A door belongs to the session's thread; only `interrupt` and `close_in_child` come from elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvtier.client.link import OpenSession
from kvtier.errors import KVTierError
from kvtier.types import PROTOCOL_VERSION, EngineId, Role


class SessionEnded(KVTierError):
    """The daemon closed the session, or we are closing it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who says Hello."""

    engine_id: EngineId
    role: Role
    shards: tuple[int, ...]
    name: str
    memory_node: int | None = None  # The NUMA node nearest to the device.
    maps_segments: bool = False  # It copies from segments of the CXL tier itself.

    @property
    def knows_segments(self) -> bool:
        """A scheduler maps nothing; it only tells its workers."""
        return self.maps_segments or self.role is Role.SCHEDULER


class Door(Protocol):
    """One way to open a session."""

    def open(self) -> OpenSession:
        """Open a session, naming the last one. Raises OSError, KVTierError."""
        ...

    def fileno(self) -> int | None:
        """The descriptor to wait on, if there is one."""
        ...

    @property
    def due_seconds(self) -> float | None:
        """How long until `advance` has something to do by itself; None: never."""
        ...

    @property
    def has_unsent(self) -> bool: ...

    def receive(self) -> None:
        """Handle the packets that have come. Raises SessionEnded, OSError, BadFrame."""
        ...

    def advance(self) -> None:
        """Open namespaces not opened yet, send what is due. Never waits long."""
        ...

    def close(self, *, orderly: bool) -> None:
        """End the session; orderly: say Bye."""
        ...

    def interrupt(self) -> None:
        """Make a waiting `open` or `advance` return; from another thread."""
        ...

    def close_in_child(self) -> None: ...


def is_protocol_known(daemon_protocol: int) -> bool:
    """Client protocol N works with daemon protocol N-1, N and N+1."""
    return abs(daemon_protocol - PROTOCOL_VERSION) <= 1
