"""Connections that the daemon has looked at, passed on to a gRPC socket that only it can reach.

gRPC's library accepts on its own and tells nothing of a Unix socket's peer but the name that it is
bound to. So each client is connected from a name that nobody can guess: by that a call knows whose
connection it came by.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import Counter
from pathlib import Path

from kvtier.errors import Forbidden, LimitExceeded
from kvtier.server.security import Peer

PIECE_BYTES = 256 << 10
CONNECTIONS_MAX = 256  # Of each tenant; three descriptors each.
_SCHEME = "unix-abstract:"  # How gRPC writes such a name.


class Passage:
    """To one gRPC socket. `origin` may be asked by another thread than the one that carries."""

    def __init__(self, inner: Path, *, connections_max: int = CONNECTIONS_MAX) -> None:
        self._inner = inner
        self._connections_max = connections_max
        self._peers: dict[str, Peer] = {}  # By the name of the connection to gRPC.
        self._counts: Counter[str] = Counter()  # By tenant.

    def __len__(self) -> int:
        return len(self._peers)

    def origin(self, peer: str) -> Peer:
        """Whose call it is; `peer` is gRPC's word for the other end. Raises Forbidden."""
        found = self._peers.get(peer)
        if found is None:
            raise Forbidden("this connection is nobody's: connect to the tenant's own socket")
        return found

    def require_room(self, tenant: str) -> None:
        """Raises LimitExceeded."""
        if self._counts[tenant] >= self._connections_max:
            raise LimitExceeded(f"{self._connections_max} connections are open: close some")

    async def carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer
    ) -> None:
        """Until one of the two ends; both are then."""
        name = f"kvtier-{secrets.token_hex(16)}"
        self._peers[_SCHEME + name] = peer
        self._counts[peer.tenant] += 1
        try:
            inner_reader, inner_writer = await self._connect(name)
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, inner_writer))
                both.create_task(_pump(inner_reader, writer))
        except* (OSError, RuntimeError):
            pass  # One of the two has gone; RuntimeError is uvloop's word for it in a write.
        finally:
            self._counts[peer.tenant] -= 1
            del self._peers[_SCHEME + name]
            writer.close()

    async def _connect(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        inner.setblocking(False)
        try:
            inner.bind(f"\0{name}")
            loop = asyncio.get_running_loop()
            await loop.sock_connect(inner, str(self._inner))
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
