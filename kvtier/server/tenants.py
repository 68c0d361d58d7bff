"""The tenants of this daemon, each behind a session socket of its own; who may connect there."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvtier.config import Config
from kvtier.config_tenant import PRIORITIES, TenantConfig, all_ids
from kvtier.core.tenancy import TenantBudget
from kvtier.errors import ConfigError, Forbidden, KVTierError
from kvtier.paths import grpc_socket_path, lane_socket_path
from kvtier.server.call_limits import CallLimits
from kvtier.server.owners import Owners
from kvtier.server.peers import Credentials, peer_credentials
from kvtier.server.security import Peer, Rights
from kvtier.types import EngineId

UID_MAP = Path("/proc/self/uid_map")


@dataclass(frozen=True, slots=True)
class Tenant:
    """One of them. `config` is None for the owner of `server.socket`."""

    name: str
    socket: Path
    config: TenantConfig | None = None
    is_alone: bool = True  # There is no other.

    @property
    def grpc_socket(self) -> Path:
        return grpc_socket_path(self.socket)

    @property
    def inner_grpc_socket(self) -> Path:
        """Where gRPC listens when the daemon looks at who connects first."""
        return self.grpc_socket.with_suffix(".inner")

    @property
    def inner_tls_socket(self) -> Path:
        """Where it listens behind the door that ends TLS."""
        return self.grpc_socket.with_suffix(".tls")

    @property
    def lane_socket(self) -> Path:
        return lane_socket_path(self.socket)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Of all its sockets."""
        inner = (self.inner_grpc_socket,) if self.names_users else ()
        return (self.socket, self.grpc_socket, self.lane_socket, self.inner_tls_socket, *inner)

    @property
    def names_users(self) -> bool:
        return self.config is not None and self.config.names_users

    @property
    def anonymous(self) -> Peer:
        """Somebody behind this socket, who he is nobody asks."""
        return Peer(self.name, None, self._rights_of_all)

    def admit(self, credentials: Credentials) -> Peer:
        """Who has connected here; raises Forbidden."""
        rights = self._rights_of(credentials)
        if rights is None:
            raise Forbidden(
                f"user {credentials.uid} is in no list of [tenant.{self.name}]: its operator has "
                "to enter you"
            )
        return Peer(self.name, credentials.uid, rights)

    def engine(self, engine: EngineId) -> EngineId:
        """An engine's id counts within its tenant: whoever learns that of another tenant's engine
        cannot join it."""
        if self.is_alone:
            return engine
        digest = blake2b(engine, digest_size=16, person=b"kvtier engine", key=self._key)
        return EngineId(digest.digest())

    @property
    def _key(self) -> bytes:
        return self.name.encode()[:64]

    @property
    def _rights_of_all(self) -> Rights:
        return Rights.OPERATOR if self.config is None else Rights.ADMIN

    def _rights_of(self, credentials: Credentials) -> Rights | None:
        config = self.config
        if config is None or not config.names_users:
            return self._rights_of_all
        uid = credentials.uid
        if uid in config.admins:
            return Rights.ADMIN
        if uid in config.readers:
            return Rights.READER
        if uid in config.uids or credentials.gids & set(config.gids):
            return Rights.ENGINE
        return None


def refusal_facts(
    tenant: Tenant, connection: socket.socket, error: KVTierError
) -> dict[str, object]:
    """Of the line about a connection that was refused."""
    try:
        uid: int | None = peer_credentials(connection).uid
    except OSError:
        uid = None
    error_name = type(error).__name__
    return {"tenant": tenant.name or None, "uid": uid, "error": error_name, "reason": str(error)}


def tenants_of(own: str, socket: Path, others: Mapping[str, TenantConfig]) -> tuple[Tenant, ...]:
    """All of them, the owner of `server.socket` first."""
    return (
        Tenant(own, socket, is_alone=not others),
        *(
            Tenant(name, Path(its.socket).expanduser().absolute(), its, is_alone=False)
            for name, its in others.items()
        ),
    )


def tenant_budgets(tenants: Mapping[str, TenantConfig]) -> dict[str, TenantBudget]:
    """As the core wants them."""
    return {
        name: TenantBudget(it.minimum, it.maximum, it.weight, PRIORITIES.index(it.priority))
        for name, it in tenants.items()
    }


def owners_of(config: Config, state_dir: Path) -> Owners | None:
    """Where it is written down whose the namespaces are; None where there is one tenant."""
    if not config.tenant:
        return None
    owners = Owners(
        state_dir / "owners", is_nvme_all=not (config.cxl.is_set or config.remote.is_set)
    )
    if not config.nvme.paths:
        owners.keep_only(())
    return owners


def call_limits(config: Config) -> CallLimits:
    rates = {name: it.calls_per_second for name, it in config.tenant.items() if it.calls_per_second}
    return CallLimits(calls_max=config.grpc.calls_max, rates=rates)


def check_users_visible(tenants: Iterable[TenantConfig], uid_map: Path = UID_MAP) -> None:
    """ConfigError for a user whom the kernel cannot name to this process, such as under systemd's
    PrivateUsers=yes: everybody would be `nobody`."""
    try:
        lines = uid_map.read_text().splitlines()
    except OSError:
        return  # No user namespaces here.
    seen = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    for uid in sorted(all_ids(tenants)):
        if not any(first <= uid < first + count for first, count in seen):
            raise ConfigError(
                f"user {uid} of a tenant is not to be seen from this user namespace (of a "
                "container, or PrivateUsers=yes of a unit): run the daemon in that of its clients"
            )
