"""A tenant's door: its session socket, with gRPC and the lane beside it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from kvtier.config import Config
from kvtier.metrics.calls import CallMetrics
from kvtier.server.activation import SOCKET_UMASK, Listeners
from kvtier.server.calls import MESSAGE_BYTES_MAX, Calls, Handlers, OriginOf
from kvtier.server.certificates import TlsFiles, grants_of
from kvtier.server.grpc_door import GrpcDoor
from kvtier.server.grpc_server import GrpcServer
from kvtier.server.lane import LaneListener
from kvtier.server.passage import Passage
from kvtier.server.session_socket import SessionSocket
from kvtier.server.tenants import Tenant
from kvtier.server.tls_door import TlsDoor, TlsSettings

# What gRPC itself refuses, without a word to us; what is too large and smaller is refused by name.
RECEIVED_BYTES_MAX = 2 * MESSAGE_BYTES_MAX
# A certificate that was taken back, and an authority, counts for so long at most.
AGE_SECONDS_MAX = 3600.0
AGE_GRACE_SECONDS = 60.0
# A client that is there answers a ping within so many times `hello_seconds`.
PING_HELLOS = 4
PRIVATE_UMASK = 0o177


@dataclass(frozen=True, slots=True)
class Door:
    """Bound; `socket` is started first, gRPC and the lane are by `start`."""

    tenant: Tenant
    socket: SessionSocket
    lane: LaneListener
    grpc: GrpcServer
    grpc_door: GrpcDoor | None  # Before gRPC, where the tenant names its users.

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        await self.grpc.start()
        tasks.create_task(self.grpc.keep())
        if self.grpc_door is not None:
            await self.grpc_door.start()
        await self.lane.start(tasks)

    async def stop_grpc(self, grace_seconds: float) -> None:
        """Twice changes nothing."""
        await self.grpc.stop(grace_seconds)
        if self.grpc_door is not None:
            self.grpc_door.close()


@dataclass(frozen=True, slots=True)
class RemoteDoor:
    """gRPC for other machines, with TLS before it. Bound."""

    address: str
    servers: tuple[GrpcServer, ...]  # One a tenant: what ends one is nobody else's trouble.
    tls_door: TlsDoor

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        for server in self.servers:
            await server.start()
            tasks.create_task(server.keep())
        self.tls_door.start()

    async def stop_grpc(self, grace_seconds: float) -> None:
        """Twice changes nothing."""
        await asyncio.gather(*(server.stop(grace_seconds) for server in self.servers))
        self.tls_door.close()


@dataclass(frozen=True, slots=True)
class DoorMaker:
    """What all doors share."""

    calls: Calls
    handlers: Handlers
    listeners: Listeners
    config: Config
    metrics: CallMetrics
    session_socket: Callable[[Tenant], SessionSocket]
    bound: list[Path]  # Noted here as they are bound, for who must remove them.

    def open(self, tenant: Tenant) -> Door:
        """Bind its sockets; raises ConfigError."""
        grpc_door = self._grpc_door(tenant) if tenant.names_users else None
        server = self._server(tenant, grpc_door)
        answer = self.calls.lane(self.handlers)
        lane = LaneListener(answer, tenant, connections_max=self.config.grpc.calls_max)
        lane.listen(self._take(tenant.lane_socket, socket.SOCK_STREAM))
        session_socket = self.session_socket(tenant)
        session_socket.listen(self._take(tenant.socket, socket.SOCK_SEQPACKET))
        return Door(tenant, session_socket, lane, server, grpc_door)

    def open_remote(
        self, tenants: Sequence[Tenant], fail: Callable[[BaseException], None]
    ) -> RemoteDoor:
        """For `grpc.tcp` with TLS; raises ConfigError."""
        config = self.config
        settings = TlsSettings(
            TlsFiles(config.grpc), grants_of(config), config.server.hello_seconds
        )
        passages = {tenant.name: Passage(tenant.inner_tls_socket) for tenant in tenants}
        tls_door = TlsDoor(settings, passages, self.metrics, fail)
        address = tls_door.listen(config.grpc.tcp)
        ages = [
            ("grpc.max_connection_age_ms", int(AGE_SECONDS_MAX * 1e3)),
            ("grpc.max_connection_age_grace_ms", int(AGE_GRACE_SECONDS * 1e3)),
        ]
        servers = tuple(
            self._grpc_at(
                tenant.inner_tls_socket, passages[tenant.name].origin, PRIVATE_UMASK, ages
            )
            for tenant in tenants
        )
        return RemoteDoor(address, servers, tls_door)

    def _take(self, path: Path, kind: socket.SocketKind) -> socket.socket:
        taken = self.listeners.take(path, kind)
        self.bound.append(path)
        return taken

    def _grpc_door(self, tenant: Tenant) -> GrpcDoor:
        door = GrpcDoor(tenant)
        door.listen(self._take(tenant.grpc_socket, socket.SOCK_STREAM))
        return door

    def _server(self, tenant: Tenant, door: GrpcDoor | None) -> GrpcServer:
        if door is not None:
            return self._grpc_at(tenant.inner_grpc_socket, door.origin, PRIVATE_UMASK)
        anonymous = tenant.anonymous
        return self._grpc_at(tenant.grpc_socket, lambda _: anonymous)

    def _grpc_at(
        self,
        path: Path,
        origin_of: OriginOf,
        umask: int = SOCKET_UMASK,
        more: Sequence[tuple[str, int]] = (),
    ) -> GrpcServer:
        server = GrpcServer(partial(self._bare_server, origin_of, more), path, umask=umask)
        self.bound.append(path)
        return server

    def _bare_server(self, origin_of: OriginOf, more: Sequence[tuple[str, int]]) -> grpc.aio.Server:
        hello_ms = int(self.config.server.hello_seconds * 1e3)
        idle_ms = int(self.config.grpc.idle_seconds * 1e3)
        return grpc.aio.server(
            handlers=[self.calls.service(self.handlers, origin_of)],
            options=[
                ("grpc.max_receive_message_length", RECEIVED_BYTES_MAX),
                ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
                ("grpc.so_reuseport", 0),
                # Who says half of something is no client for long.
                ("grpc.server_handshake_timeout_ms", hello_ms),
                ("grpc.max_connection_idle_ms", idle_ms),
                ("grpc.keepalive_time_ms", idle_ms),
                ("grpc.keepalive_timeout_ms", PING_HELLOS * hello_ms),
                ("grpc.http2.ping_timeout_ms", PING_HELLOS * hello_ms),
                *more,
            ],
        )
