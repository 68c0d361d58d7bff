"""gRPC for tenants whose users are named: the daemon accepts, looks who it is, and passes bytes on.

gRPC listens where only the daemon's own user can connect (passage.py).
"""

from __future__ import annotations

import asyncio
import logging
import socket

from kvtier.errors import Forbidden, LimitExceeded
from kvtier.server.passage import PIECE_BYTES, Passage
from kvtier.server.peers import peer_credentials
from kvtier.server.security import Peer
from kvtier.server.tenants import Tenant, refusal_facts

log = logging.getLogger(__name__)

BACKLOG = 128


class GrpcDoor:
    """One tenant's gRPC socket, before gRPC."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._passage = Passage(tenant.inner_grpc_socket)
        self._server: asyncio.Server | None = None
        self._socket: socket.socket | None = None
        self._carried: set[asyncio.Task[None]] = set()

    def origin(self, peer: str) -> Peer:
        """See `Passage.origin`."""
        return self._passage.origin(peer)

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
        for task in self._carried:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: socket.socket = writer.get_extra_info("socket")
        try:
            peer = self._tenant.admit(peer_credentials(connection))
            self._passage.require_room(peer.tenant)
        except (Forbidden, LimitExceeded) as error:
            log.warning("connection refused", extra=refusal_facts(self._tenant, connection, error))
            writer.close()
            return
        carried = asyncio.create_task(self._passage.carry(reader, writer, peer))
        self._carried.add(carried)
        carried.add_done_callback(self._carried.discard)
        await carried
