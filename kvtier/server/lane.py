"""The daemon's end of the call lane: frames in, the same handlers as gRPC, frames out.

Invariant: at most one call runs on a connection. A client that sends on before it has read the
answer breaks the protocol and is closed; one that closes cancels its call. Anybody in our group can
connect, so nobody without a token may cost much: memory grows with the bytes that came, a frame
must be whole in time, and those who never made a good call go first when the connections are used
up.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import cast

from kvtier.errors import Forbidden
from kvtier.lane import HEAD, PAYLOAD_BYTES_MAX, REFUSED, pack
from kvtier.server.peers import peer_credentials
from kvtier.server.security import Peer
from kvtier.server.tenants import Tenant, refusal_facts

log = logging.getLogger(__name__)

# Most frames fit: one read, no allocation.
SCRATCH_BYTES = 64 << 10
BACKLOG = 128
FRAME_SECONDS_MAX = 5.0

Answer = Callable[[int, bytes, Peer], Awaitable[bytes]]
"""(call number, payload, who asks) -> the answer's frame; never raises but for cancellation."""


class LaneListener:
    """Accepts connections, at most `connections_max`."""

    def __init__(self, answer: Answer, tenant: Tenant, *, connections_max: int) -> None:
        self._answer = answer
        self._tenant = tenant
        self.connections_max = connections_max
        self._connections: dict[LaneConnection, None] = {}
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None

    def __len__(self) -> int:
        return len(self._connections)

    def listen(self, listener: socket.socket) -> None:
        """The socket is bound, and ours from now on."""
        self._socket = listener

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        assert self._socket is not None, "listen comes first"
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: LaneConnection(
                self._answer, self._admit, tasks, self._connections, self.connections_max
            ),
            sock=self._socket,
            backlog=BACKLOG,
        )

    def _admit(self, transport: asyncio.BaseTransport) -> Peer | None:
        connection: socket.socket = transport.get_extra_info("socket")
        try:
            return self._tenant.admit(peer_credentials(connection))
        except Forbidden as error:
            log.warning("connection refused", extra=refusal_facts(self._tenant, connection, error))
            return None

    def close(self) -> None:
        """Stop accepting and end every connection; calls under way are cancelled."""
        if self._server is not None:
            self._server.close()
        elif self._socket is not None:
            self._socket.close()
        for connection in list(self._connections):
            connection.close()


class LaneConnection(asyncio.BufferedProtocol):
    """One client's connection."""

    def __init__(
        self,
        answer: Answer,
        admit: Callable[[asyncio.BaseTransport], Peer | None],
        tasks: asyncio.TaskGroup,
        connections: dict[LaneConnection, None],
        connections_max: int,
    ) -> None:
        self._answer = answer
        self._admit = admit
        self._peer: Peer | None = None
        self._tasks = tasks
        self._connections = connections
        self._connections_max = connections_max
        self._transport: asyncio.Transport | None = None
        self._scratch = bytearray(SCRATCH_BYTES)
        self._frame = self._scratch  # Where the frame being read is gathered.
        self._filled_bytes = 0
        self._call: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None  # While a frame is not whole.
        self._has_called = False  # A call was answered with OK: somebody with a token.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it.
        self._connections[self] = None
        self._peer = self._admit(transport)
        if self._peer is None:
            self.close()
            return
        if len(self._connections) > self._connections_max:
            facts = {"max": self._connections_max, **self._facts()}
            log.warning("too many lane connections", extra=facts)
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.pop(self, None)
        self._set_late(None)
        if self._call is not None:
            self._call.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._frame)[self._filled_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled_bytes += nbytes
        assert self._transport is not None, "bytes before the connection"
        if self._call is not None or self._transport.get_write_buffer_size():
            log.warning("lane frame before the answer was read", extra=self._facts())
            self.close()
            return
        if self._filled_bytes < HEAD.size:
            self._expect_rest()
            return
        payload_bytes, number = HEAD.unpack_from(self._frame)
        frame_bytes = HEAD.size + payload_bytes
        if payload_bytes > PAYLOAD_BYTES_MAX or self._filled_bytes > frame_bytes:
            log.warning("lane frame refused", extra={"bytes": payload_bytes, **self._facts()})
            self.close()
        elif self._filled_bytes == frame_bytes:
            payload = memoryview(self._frame)[HEAD.size : frame_bytes]
            self._begin(number, bytes(payload))  # gil-ok: control messages, 1 MiB at most
        else:
            self._expect_rest()
            if self._filled_bytes == len(self._frame):  # Not by what it says: by what has come.
                larger = bytearray(min(frame_bytes, 2 * len(self._frame)))
                larger[: self._filled_bytes] = self._frame
                self._frame = larger

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _make_room(self) -> None:
        """Close the oldest connection that made no good call; if there is none, refuse this one."""
        assert self._transport is not None, "too many before the connection"
        for other in self._connections:
            if other is not self and not other._has_called and other._call is None:
                del self._connections[other]
                other.close()
                return
        self._transport.write(refusal(REFUSED, "too many connections: use gRPC"))
        self._transport.close()

    def _expect_rest(self) -> None:
        if self._late is None:
            loop = asyncio.get_running_loop()
            self._set_late(loop.call_later(FRAME_SECONDS_MAX, self._end_late))

    def _end_late(self) -> None:
        log.warning("lane frame too slow", extra={"bytes": self._filled_bytes, **self._facts()})
        self.close()

    def _facts(self) -> dict[str, object]:
        """Of a line about who is at the other end."""
        peer = self._peer
        return {} if peer is None else {"tenant": peer.tenant or None, "uid": peer.uid}

    def _set_late(self, late: asyncio.TimerHandle | None) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = late

    def _begin(self, number: int, payload: bytes) -> None:
        self._set_late(None)
        assert self._call is None, "two calls on one connection"
        self._frame, self._filled_bytes = self._scratch, 0
        self._call = self._tasks.create_task(self._run(number, payload))

    async def _run(self, number: int, payload: bytes) -> None:
        transport = self._transport
        assert transport is not None, "a call before the connection"
        try:
            assert self._peer is not None, "a call of nobody"
            frame = await self._answer(number, payload, self._peer)
        finally:
            self._call = None
        self._has_called |= HEAD.unpack_from(frame)[1] == 0
        if not transport.is_closing():
            transport.write(frame)


def refusal(status: int, text: str) -> bytes:
    """The answer's frame for a call that failed."""
    return pack(status, text.encode("utf-8", errors="replace"))
