"""One connection of the session socket: whole packets, fds beside them, never blocking.

Invariants: at most `QUEUE_FRAMES_MAX` frames wait for a client that does not read, then the link is
closed; every fd that arrives is handed on or closed; every fd that waits to be sent is our own
duplicate, so that whoever owns the original may close it.
"""

from __future__ import annotations

import array
import asyncio
import os
import select
import socket
from collections import deque
from dataclasses import dataclass, field

FRAME_BYTES_MAX = 64 << 10
# Offers of every slab of a 64 GiB budget with 1 GiB slabs fit many times over.
QUEUE_FRAMES_MAX = 4096
FDS_MAX = 4  # A client sends one at most; more are closed and refused.
_FD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Packet:
    """What arrived. `fds` belong to the receiver."""

    data: bytes
    fds: list[int] = field(default_factory=list)
    is_truncated: bool = False  # Longer than FRAME_BYTES_MAX: the rest is lost.
    is_missing_fds: bool = False  # The kernel dropped fds (MSG_CTRUNC).

    def close_fds(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


class Link:
    """A SOCK_SEQPACKET connection on the event loop."""

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._loop = loop
        self._waiting: deque[tuple[bytes, int | None]] = deque()
        self._readable: asyncio.Future[None] | None = None
        self.is_closed = False

    async def receive(self) -> Packet | None:
        """The next packet; None when the peer has closed, or we have.

        One packet a turn of the loop, or a peer that never stops would be the only one served.
        """
        await asyncio.sleep(0)
        while not self.is_closed:
            try:
                packet = self._receive_now()
            except BlockingIOError:
                await self._wait_readable()
                continue
            except OSError:
                return None  # Reset: the same as closed.
            if not packet.data and not packet.fds and self._is_hung_up():
                return None
            return packet
        return None

    def send(self, data: bytes, fd: int | None = None) -> None:
        """Send now, or queue it; a client that does not read loses its link."""
        assert len(data) <= FRAME_BYTES_MAX, "a frame of ours is too long"
        if self.is_closed:
            return
        if self._waiting:
            self._queue(data, fd)
            return
        try:
            self._send_now(data, fd)
        except BlockingIOError:
            self._queue(data, fd)
            if not self.is_closed:
                self._loop.add_writer(self.connection.fileno(), self._flush)
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the connection; `receive` returns None. Closing twice changes nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        fd = self.connection.fileno()
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)
        while self._waiting:
            _close_fd(self._waiting.popleft()[1])
        self.connection.close()
        self._wake()

    # --------------------------------------------------------------------------------- helpers

    def _receive_now(self) -> Packet:
        room = socket.CMSG_SPACE(FDS_MAX * _FD_BYTES)
        data, ancillary, flags, _ = self.connection.recvmsg(
            FRAME_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC
        )
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
        return Packet(
            data,
            fds.tolist(),
            is_truncated=bool(flags & socket.MSG_TRUNC),
            is_missing_fds=bool(flags & socket.MSG_CTRUNC),
        )

    async def _wait_readable(self) -> None:
        assert self._readable is None, "two tasks receive from one link"
        fd = self.connection.fileno()
        self._readable = self._loop.create_future()
        self._loop.add_reader(fd, self._wake)
        try:
            await self._readable
        finally:
            self._readable = None
            if not self.is_closed:
                self._loop.remove_reader(fd)

    def _wake(self) -> None:
        if self._readable is not None and not self._readable.done():
            self._readable.set_result(None)

    def _is_hung_up(self) -> bool:
        """An empty packet and the end of the connection look alike; the poll flags do not."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def _send_now(self, data: bytes, fd: int | None) -> None:
        beside = []
        if fd is not None:
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        self.connection.sendmsg([data], beside, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def _queue(self, data: bytes, fd: int | None) -> None:
        if len(self._waiting) >= QUEUE_FRAMES_MAX:
            self.close()
            return
        try:
            ours = None if fd is None else os.dup(fd)
        except OSError:
            self.close()  # Out of descriptors: whoever does not read them must not end us.
            return
        self._waiting.append((data, ours))

    def _flush(self) -> None:
        while self._waiting:
            data, fd = self._waiting[0]
            try:
                self._send_now(data, fd)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            self._waiting.popleft()
            _close_fd(fd)
        self._loop.remove_writer(self.connection.fileno())


def _close_fd(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
