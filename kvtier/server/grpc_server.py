"""gRPC at one path, made anew when it has ended by itself.

grpcio's asyncio server (seen with 1.85) ends for good at a call whose name is no UTF-8: the
exception leaves its loop, the sockets are closed, and nobody is told. Whoever may connect can send
one. So the daemon looks whether the path is there; sessions, leases and the lane do not notice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import grpc

from kvtier.config_address import split_address
from kvtier.errors import ConfigError
from kvtier.server.activation import SOCKET_UMASK, socket_mode

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
_END_SECONDS = 0.1  # For what is left of a server that has ended.


class GrpcServer:
    """Bound when it is made; raises ConfigError then."""

    def __init__(
        self, make: Callable[[], grpc.aio.Server], path: Path, *, umask: int = SOCKET_UMASK
    ) -> None:
        """`make`: a server that is bound nowhere yet."""
        self._make = make
        self._path = path
        self._umask = umask
        self._tcp = ""
        self._is_stopped = False
        self._server = self._bound()

    def listen_tcp(self, address: str, option: str) -> str:
        """Bind there, too; the address with its port. Raises ConfigError."""
        port = add_port(self._server, address, option)
        self._tcp = f"{split_address(option, address)[0]}:{port}"
        return self._tcp

    async def start(self) -> None:
        await self._server.start()

    async def keep(self) -> None:
        """Look again and again, until it is stopped."""
        while True:  # Ends: stopped, or cancelled with the daemon.
            await asyncio.sleep(LOOK_SECONDS)
            if self._is_stopped:
                return
            if not self._path.is_socket():
                await self._begin_anew()

    async def stop(self, grace_seconds: float) -> None:
        """Twice changes nothing."""
        self._is_stopped = True
        await self._server.stop(grace_seconds)

    async def _begin_anew(self) -> None:
        log.warning("gRPC has ended, it begins anew", extra={"path": str(self._path)})
        await self._server.stop(_END_SECONDS)
        if self._is_stopped:
            return
        try:
            self._server = self._bound()
        except ConfigError:
            return  # The port is not free yet: the next look tries again.
        await self._server.start()

    def _bound(self) -> grpc.aio.Server:
        server = self._make()
        with socket_mode(self._umask):
            add_port(server, f"unix:{self._path}", "server.socket")
        if self._tcp:
            add_port(server, self._tcp, "grpc.tcp")
        return server


def add_port(server: grpc.aio.Server, address: str, option: str) -> int:
    """The port, where there is one."""
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"{option}: cannot listen at {address} ({error})") from None
