"""What a forked child inherits from a client, and how it is kept from using it.

Threads do not survive a fork, gRPC must not be touched after one, and an inherited socket would
make a dead engine look alive. So, in the child: every call raises Unavailable, the sockets are
closed (without shutdown, which would end the parent's), and the mappings are not there
(MADV_DONTFORK).
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from kvtier.errors import Unavailable


class Inherited(Protocol):
    def close_in_child(self) -> None:
        """Close descriptors, touch nothing else; runs in the child before any other code."""
        ...


fork_guard = threading.Lock()
"""Held while descriptors are received, mapped and closed: a fork in between would give the child a
descriptor nobody knows of, or a mapping not yet marked MADV_DONTFORK. Held for microseconds."""

_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def watch_forks(owner: Inherited) -> None:
    """Let `owner` close its descriptors in every child forked from now on."""
    _inherited.add(owner)


def check_not_forked(owner_pid: int) -> None:
    """Raises Unavailable in a child of the process that made the client."""
    if os.getpid() != owner_pid:
        raise Unavailable("this process was forked from the client's: make a new Client in it")


def _after_fork_in_child() -> None:
    fork_guard.release()
    for owner in list(_inherited):
        owner.close_in_child()
    _inherited.clear()


os.register_at_fork(
    before=fork_guard.acquire,
    after_in_parent=fork_guard.release,
    after_in_child=_after_fork_in_child,
)
