"""A tenant's door: its session socket, with gRPC and the lane beside it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvtier.errors import ConfigError
from kvtier.server.activation import Listeners, socket_mode
from kvtier.server.calls import Calls, Handlers
from kvtier.server.grpc_door import GrpcDoor
from kvtier.server.lane import LaneListener
from kvtier.server.session_socket import SessionSocket
from kvtier.server.tenants import Tenant

MESSAGE_BYTES_MAX = 4 << 20
PRIVATE_UMASK = 0o177


@dataclass(frozen=True, slots=True)
class Door:
    """Bound; `socket` is started first, gRPC and the lane are by `start`."""

    tenant: Tenant
    socket: SessionSocket
    lane: LaneListener
    grpc: grpc.aio.Server
    grpc_door: GrpcDoor | None  # Before gRPC, where the tenant names its users.

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        await self.grpc.start()
        if self.grpc_door is not None:
            await self.grpc_door.start()
        await self.lane.start(tasks)

    async def stop_grpc(self, grace_seconds: float) -> None:
        """Twice changes nothing."""
        await self.grpc.stop(grace_seconds)
        if self.grpc_door is not None:
            self.grpc_door.close()


@dataclass(frozen=True, slots=True)
class DoorMaker:
    """What all doors share."""

    calls: Calls
    handlers: Handlers
    listeners: Listeners
    connections_max: int
    session_socket: Callable[[Tenant], SessionSocket]
    bound: list[Path]  # Noted here as they are bound, for who must remove them.

    def open(self, tenant: Tenant) -> Door:
        """Bind its sockets; raises ConfigError."""
        grpc_door = self._grpc_door(tenant) if tenant.names_users else None
        server = self._server(tenant, grpc_door)
        answer = self.calls.lane(self.handlers)
        lane = LaneListener(answer, tenant, connections_max=self.connections_max)
        lane.listen(self._take(tenant.lane_socket, socket.SOCK_STREAM))
        session_socket = self.session_socket(tenant)
        session_socket.listen(self._take(tenant.socket, socket.SOCK_SEQPACKET))
        return Door(tenant, session_socket, lane, server, grpc_door)

    def _take(self, path: Path, kind: socket.SocketKind) -> socket.socket:
        taken = self.listeners.take(path, kind)
        self.bound.append(path)
        return taken

    def _grpc_door(self, tenant: Tenant) -> GrpcDoor:
        door = GrpcDoor(tenant)
        door.listen(self._take(tenant.grpc_socket, socket.SOCK_STREAM))
        return door

    def _server(self, tenant: Tenant, door: GrpcDoor | None) -> grpc.aio.Server:
        anonymous = tenant.anonymous
        service = self.calls.service(
            self.handlers, (lambda _: anonymous) if door is None else door.origin
        )
        server = grpc.aio.server(
            handlers=[service],
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
                ("grpc.so_reuseport", 0),
            ],
        )
        path = tenant.grpc_socket if door is None else tenant.inner_grpc_socket
        with socket_mode() if door is None else socket_mode(PRIVATE_UMASK):
            add_port(server, f"unix:{path}", "server.socket")
        self.bound.append(path)
        return server


def add_port(server: grpc.aio.Server, address: str, option: str) -> int:
    """The port, where there is one."""
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"{option}: cannot listen at {address} ({error})") from None
