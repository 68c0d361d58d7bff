"""The holder: a process that keeps file descriptors while a daemon is restarted.

Where there is no systemd, whose FD store does the same. It does nothing else, so that there is
never a reason to restart it. Only the standard library: it takes few MiB and no start-up time.

One Unix socket of type SOCK_SEQPACKET, mode 0600; peers of the same user (or root) are served. A
request and its answer are one packet of JSON each, file descriptors travel beside them:

    {"do": "own"}                        this connection owns the set from now on
    {"do": "park", "name": N}      + fd  keep this; what had the name before is closed
    {"do": "unpark", "name": N}          close it; an unknown name changes nothing
    {"do": "take", "first": I}           -> {"names": [...], "count": all} + fds, TAKEN_MAX at most

Every answer has "ok", or "error" with a sentence. Invariants: one connection owns the set, until it
closes; what was parked is kept until it is unparked, replaced, or the holder ends; there are never
more than `count_max`.
"""

from __future__ import annotations

import array
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKET_BYTES_MAX = 32 << 10
TAKEN_MAX = 100  # The kernel passes 253 at once.
COUNT_MAX = 4096
CONNECTIONS_MAX = 16
NAME_CHARACTERS_MAX = 200
_FD_BYTES = 4
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(eq=False, slots=True)
class Peer:
    connection: socket.socket
    fds: list[int] = field(default_factory=list)  # Came beside the request in hand.


class Holder:
    """The set, and who owns it."""

    def __init__(self, listener: socket.socket, *, count_max: int = COUNT_MAX) -> None:
        """`listener` is bound and listening, and ours."""
        self._listener = listener
        self._count_max = count_max
        self._kept: dict[str, int] = {}
        self._owner: Peer | None = None
        self._peers: set[Peer] = set()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._is_stopped = False

    def run(self, wakeup: socket.socket | None = None) -> None:
        """Serve until `wakeup` becomes readable."""
        if wakeup is not None:
            self._selector.register(wakeup, selectors.EVENT_READ, wakeup)
        while not self._is_stopped:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._accept()
                elif isinstance(key.data, Peer):
                    self._serve(key.data)
                else:
                    self._is_stopped = True

    def close(self) -> None:
        for peer in list(self._peers):
            self._drop(peer)
        for fd in self._kept.values():
            os.close(fd)
        self._kept.clear()
        self._selector.close()
        self._listener.close()

    # ----------------------------------------------------------------------------- connections

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # Gone again, or out of descriptors: it is asked for again.
        if len(self._peers) >= CONNECTIONS_MAX or not _may_use(connection):
            connection.close()
            return
        connection.setblocking(False)
        peer = Peer(connection)
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _serve(self, peer: Peer) -> None:
        try:
            data, peer.fds = receive(peer.connection)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            if not data:
                self._drop(peer)
                return
            answer, fds = self._answer(peer, data)
            send(peer.connection, answer, fds)
        except OSError:  # It does not read its answers, or is gone.
            self._drop(peer)
        finally:
            close_all(peer.fds)

    def _drop(self, peer: Peer) -> None:
        self._peers.discard(peer)
        if self._owner is peer:
            self._owner = None
        self._selector.unregister(peer.connection)
        peer.connection.close()

    # -------------------------------------------------------------------------------- requests

    def _answer(self, peer: Peer, data: bytes) -> tuple[dict[str, Any], list[int]]:
        try:
            asked = json.loads(data)
            what = asked["do"]
            if what == "own":
                return self._own(peer), []
            if self._owner is not peer:
                return _refused("another connection owns the set, or nobody: send own first"), []
            if what == "park":
                return self._park(peer, asked["name"]), []
            if what == "unpark":
                return self._unpark(asked["name"]), []
            if what == "take":
                return self._take(int(asked["first"]))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            pass
        return _refused("no request that this holder knows"), []

    def _own(self, peer: Peer) -> dict[str, Any]:
        if self._owner not in (None, peer):
            return _refused("another daemon's connection owns the set")
        self._owner = peer
        return {"ok": True, "count": len(self._kept)}

    def _park(self, peer: Peer, name: str) -> dict[str, Any]:
        if not is_name(name):
            return _refused("a name has 1 to 200 letters, digits, '.', '_' and '-'")
        if len(peer.fds) != 1:
            return _refused("one file descriptor must come beside park")
        if name not in self._kept and len(self._kept) >= self._count_max:
            return _refused(f"{self._count_max} file descriptors are kept (--count-max)")
        before = self._kept.get(name)
        self._kept[name] = peer.fds.pop()
        if before is not None:
            os.close(before)
        return {"ok": True}

    def _unpark(self, name: str) -> dict[str, Any]:
        fd = self._kept.pop(name, None)
        if fd is not None:
            os.close(fd)
        return {"ok": True}

    def _take(self, first: int) -> tuple[dict[str, Any], list[int]]:
        names = list(self._kept)[max(first, 0) :][:TAKEN_MAX]
        answer = {"ok": True, "names": names, "count": len(self._kept)}
        return answer, [self._kept[name] for name in names]


def is_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and 0 < len(name) <= NAME_CHARACTERS_MAX
        and name.isascii()
        and name.replace("-", "a").replace("_", "a").replace(".", "a").isalnum()
    )


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and what came beside it; no bytes when the peer has closed."""
    room = socket.CMSG_SPACE((TAKEN_MAX + 1) * _FD_BYTES)
    data, ancillary, flags, _ = connection.recvmsg(PACKET_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
    found = fds.tolist()
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(found)  # Cut: what the request meant is not known.
        return b"{}", []
    return data, found


def send(connection: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    beside = []
    if fds:
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    connection.sendmsg([json.dumps(message).encode()], beside, socket.MSG_NOSIGNAL)


def close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def listen(path: Path) -> socket.socket:
    """A listener at `path` for its owner only; OSError where a holder listens already."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trial:
            if trial.connect_ex(str(path)) == 0:
                raise FileExistsError(f"a holder listens at {path} already")
        if path.is_socket():
            path.unlink()  # Left behind by one that was killed.
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    listener.listen(CONNECTIONS_MAX)
    return listener


def hold(path: Path, *, count_max: int = COUNT_MAX) -> int:
    """Run a holder until SIGTERM or SIGINT; the exit code."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = listen(path)
    wakeup, inner = socket.socketpair()
    inner.setblocking(False)
    signal.set_wakeup_fd(inner.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    holder = Holder(listener, count_max=count_max)
    sys.stdout.write(f"READY socket={path} count_max={count_max}\n")
    sys.stdout.flush()
    try:
        holder.run(wakeup)
    finally:
        holder.close()
        path.unlink(missing_ok=True)
    return 0


def _may_use(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user in (0, os.geteuid())


def _refused(reason: str) -> dict[str, Any]:
    return {"error": reason}
