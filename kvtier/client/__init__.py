"""The client: control over gRPC, bytes through shared memory, and law 2."""

from __future__ import annotations

from kvtier.client.aio import AsyncClient
from kvtier.client.arena import Arena
from kvtier.client.client import Client
from kvtier.client.settings import ClientSettings
from kvtier.client.tls import ClientTls
from kvtier.client.values import (
    EvictResult,
    Lease,
    Namespace,
    NamespaceState,
    PrefetchResult,
    PutResult,
    Reservation,
    SessionRef,
)

__all__ = [
    "Arena",
    "AsyncClient",
    "Client",
    "ClientSettings",
    "ClientTls",
    "EvictResult",
    "Lease",
    "Namespace",
    "NamespaceState",
    "PrefetchResult",
    "PutResult",
    "Reservation",
    "SessionRef",
]
