"""Listening sockets: those that systemd hands over (socket activation), or ones bound here.

systemd numbers what it passes from 3 on and tells in the environment how many there are, their
names, and for whom. What listens is a socket of ours and must be one that the configuration names;
everything else (parked descriptors) is left for whoever knows its name.

gRPC's library takes no listening socket, so the gRPC one is always bound here. Nobody misses it:
clients learn its address in the Welcome of the session socket, which is sent after it was bound.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.server.instance import clear_way

FIRST_FD = 3
NAME_UNKNOWN = "unknown"  # What sd_listen_fds calls those without a name.
SOCKET_UMASK = 0o117  # 0660 from the first moment on.
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_DIRECTIVES = {
    socket.SOCK_SEQPACKET: "ListenSequentialPacket",
    socket.SOCK_STREAM: "ListenStream",
}


@dataclass(frozen=True, slots=True)
class PassedFd:
    """One file descriptor from the service manager."""

    name: str
    fd: int

    @property
    def is_listener(self) -> bool:
        if not stat.S_ISSOCK(os.fstat(self.fd).st_mode):
            return False
        with socket.socket(fileno=os.dup(self.fd)) as found:
            return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def take_passed(environment: MutableMapping[str, str]) -> list[PassedFd]:
    """What the service manager has passed to this process; a second call finds nothing.

    A child of ours must not take them for its own, so the variables go and the descriptors are
    closed on exec.
    """
    process, count_text, names_text = (environment.pop(name, "") for name in _VARIABLES)
    if not count_text.isdecimal() or process != str(os.getpid()):
        return []
    names = names_text.split(":") if names_text else []
    passed = []
    for index in range(int(count_text)):
        fd = FIRST_FD + index
        os.set_inheritable(fd, False)
        passed.append(PassedFd(names[index] if index < len(names) else NAME_UNKNOWN, fd))
    return passed


class Listeners:
    """Where the daemon listens: `prepare` once for each path, then `take` once for each.

    Invariant: a path that was handed over is neither cleared nor removed here; its owner is the
    service manager, which goes on listening there while there is no daemon.
    """

    def __init__(self, passed: Sequence[PassedFd] = ()) -> None:
        self._passed: dict[str, socket.socket] = {}
        self._kept: set[str] = set()
        for one in passed:
            listener = socket.socket(fileno=one.fd)
            listener.setblocking(False)
            self._passed[_place(listener.getsockname())] = listener

    def prepare(self, kinds: Mapping[Path, socket.SocketKind]) -> None:
        """Before anything is bound: remove stale sockets; ConfigError for what fits nowhere."""
        left = dict(self._passed)
        for path, kind in kinds.items():
            listener = left.pop(_place(path), None)
            if listener is None:
                clear_way(path, kind)
                continue
            if listener.type != kind:
                raise ConfigError(
                    f"the service manager listens at {path} with another kind of socket: write "
                    f"{_DIRECTIVES[kind]}={path} in its socket unit"
                )
            self._kept.add(_place(path))
        for place in left:
            raise ConfigError(
                f"the service manager listens at {place or 'a network address'}, which is no "
                "socket of this daemon: its socket unit and server.socket must agree"
            )

    def take(self, path: Path, kind: socket.SocketKind) -> socket.socket:
        """The listener at this path: the one handed over, or a new one that is bound here."""
        listener = self._passed.pop(_place(path), None)
        if listener is not None:
            return listener
        listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
        listener.setblocking(False)
        with socket_mode():
            listener.bind(str(path))
        return listener

    def remove(self, path: Path) -> None:
        """Remove the socket, if it is ours to remove; twice changes nothing."""
        if _place(path) not in self._kept:
            path.unlink(missing_ok=True)


@contextmanager
def socket_mode(umask: int = SOCKET_UMASK) -> Iterator[None]:
    """What is bound inside can be used by its owner and its group, and nobody else."""
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


def _place(address: object) -> str:
    """One spelling for one socket, whatever links lead there; empty for no path at all."""
    return os.path.realpath(address) if isinstance(address, str | Path) and address else ""
