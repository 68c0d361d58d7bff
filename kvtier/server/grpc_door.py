"""gRPC for tenants whose users are named: the daemon accepts, looks who it is, and passes bytes on.

gRPC's library accepts on its own and tells nothing of a Unix socket's peer but the name that it is
bound to. So it listens where only the daemon's own user can connect, and each client is connected
to it from a name that nobody can guess: by that the call knows whose connection it came by.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket

from kvtier.errors import Forbidden
from kvtier.server.peers import peer_credentials
from kvtier.server.security import Peer
from kvtier.server.tenants import Tenant, refusal_facts

log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 10
CONNECTIONS_MAX = 256
BACKLOG = 128
_SCHEME = "unix-abstract:"  # How gRPC writes such a name.


class GrpcDoor:
    """One tenant's gRPC socket, before gRPC."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._peers: dict[str, Peer] = {}  # By the name of the connection to gRPC.
        self._server: asyncio.Server | None = None
        self._socket: socket.socket | None = None
        self._pumps: set[asyncio.Task[None]] = set()

    def origin(self, peer: str) -> Peer:
        """Whose call it is; `peer` is gRPC's word for the other end. Raises Forbidden."""
        found = self._peers.get(peer)
        if found is None:
            raise Forbidden("this connection is nobody's: connect to the tenant's own socket")
        return found

    def listen(self, listener: socket.socket) -> None:
        """The socket is bound, and ours from now on."""
        self._socket = listener

    async def start(self) -> None:
        assert self._socket is not None, "listen comes first"
        self._server = await asyncio.start_unix_server(
            self._serve, sock=self._socket, backlog=BACKLOG, limit=PIECE_BYTES
        )

    def close(self) -> None:
        """Stop accepting, and end every connection."""
        if self._server is not None:
            self._server.close()
        elif self._socket is not None:
            self._socket.close()
        for pump in self._pumps:
            pump.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: socket.socket = writer.get_extra_info("socket")
        try:
            peer = self._tenant.admit(peer_credentials(connection))
            if len(self._peers) >= CONNECTIONS_MAX:
                raise Forbidden(f"{CONNECTIONS_MAX} connections are open: close some")
        except Forbidden as error:
            log.warning("connection refused", extra=refusal_facts(self._tenant, connection, error))
            writer.close()
            return
        name = f"kvtier-{secrets.token_hex(16)}"
        self._peers[_SCHEME + name] = peer
        try:
            inner_reader, inner_writer = await self._connect(name)
            async with asyncio.TaskGroup() as both:
                for one in ((reader, inner_writer), (inner_reader, writer)):
                    pump = both.create_task(_pump(*one))
                    self._pumps.add(pump)
                    pump.add_done_callback(self._pumps.discard)
        except* OSError:
            pass  # One of the two has gone.
        finally:
            del self._peers[_SCHEME + name]
            writer.close()

    async def _connect(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        inner.setblocking(False)
        try:
            inner.bind(f"\0{name}")
            loop = asyncio.get_running_loop()
            await loop.sock_connect(inner, str(self._tenant.inner_grpc_socket))
        except BaseException:
            inner.close()
            raise
        return await asyncio.open_unix_connection(sock=inner, limit=PIECE_BYTES)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the one end is closed; the other one then is, too."""
    try:
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    finally:
        writer.close()
