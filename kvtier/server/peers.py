"""Who connected, and proof of life: credentials and pidfds of the processes behind sessions.

A pidfd becomes readable when its process, with all its threads and mappings, is gone. The kernel
gives one for the peer of a Unix socket (SO_PEERPIDFD, Linux 6.5); before that the client passes its
own beside Hello. Both work across PID namespaces, where SO_PEERCRED's pid may be 0.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SO_PEERPIDFD = 77
SO_PEERGROUPS = 59
_GROUPS_MAX = 65_536
_CREDENTIALS = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of the process that connected, at that moment, as this process's user namespace has them."""

    uid: int
    gids: frozenset[int]


def peer_credentials(connection: socket.socket) -> Credentials:
    """What the kernel says of who connected to this Unix socket."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, gid = _CREDENTIALS.unpack(packed)
    try:
        groups = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * _GROUPS_MAX)
    except OSError:
        groups = b""
    return Credentials(uid, frozenset((gid, *struct.unpack(f"{len(groups) // 4}I", groups))))


def peer_pidfd(connection: socket.socket) -> int | None:
    """A pidfd of the process that connected; None where the kernel cannot tell (or it is gone)."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        return None


def is_pidfd(fd: int) -> bool:
    """Whether a client passed a pidfd, and not just any file."""
    try:
        text = Path(f"/proc/self/fdinfo/{fd}").read_text()
    except OSError:
        return False
    return any(line.startswith("Pid:") for line in text.splitlines())


class PidfdWatch:
    """Owns the pidfds it watches; each calls back at most once and is closed then."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watched: set[int] = set()

    def watch(self, pidfd: int, on_death: Callable[[], None]) -> None:
        """`on_death` is called once when the process is gone, unless `forget` comes first."""
        assert pidfd not in self._watched, "a pidfd is watched twice"
        self._watched.add(pidfd)
        self._loop.add_reader(pidfd, self._fire, pidfd, on_death)

    def forget(self, pidfd: int) -> None:
        """Stop watching and close it; a pidfd that fired is forgotten already."""
        if pidfd in self._watched:
            self._watched.remove(pidfd)
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def release(self, pidfd: int) -> None:
        """Stop watching; the fd stays open and is the caller's."""
        self._watched.remove(pidfd)
        self._loop.remove_reader(pidfd)

    def close(self) -> None:
        for pidfd in list(self._watched):
            self.forget(pidfd)

    def _fire(self, pidfd: int, on_death: Callable[[], None]) -> None:
        self.forget(pidfd)
        on_death()
