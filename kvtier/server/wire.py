"""Between protocol messages and the core's values: specs, packed hashes, slots, statuses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import grpc
import numpy as np

from kvtier.core.events import Slots
from kvtier.errors import (
    BadRequest,
    CorruptReplica,
    Draining,
    Forbidden,
    KVTierError,
    LimitExceeded,
    ProtocolMismatch,
    TierFull,
    Unauthenticated,
    Unavailable,
    UnknownNamespace,
)
from kvtier.namespace import NamespaceSpec
from kvtier.types import PROTOCOL_VERSION, BlockHash, TierName
from kvtier.v1 import kvtier_pb2 as pb

HASHES_BYTES_MAX = 1 << 20
"""32,768 hashes of 32 bytes: a prompt of half a million tokens in blocks of 16."""

_STATUS: Sequence[tuple[type[KVTierError], grpc.StatusCode]] = (
    # The first class that fits counts, so subclasses stand before their bases.
    (ProtocolMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (BadRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (Forbidden, grpc.StatusCode.PERMISSION_DENIED),
    (UnknownNamespace, grpc.StatusCode.NOT_FOUND),
    (TierFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (LimitExceeded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Draining, grpc.StatusCode.UNAVAILABLE),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (CorruptReplica, grpc.StatusCode.DATA_LOSS),
)


def status_of(error: KVTierError) -> grpc.StatusCode:
    return next((code for kind, code in _STATUS if isinstance(error, kind)), _OTHER)


_OTHER = grpc.StatusCode.INTERNAL


def check_protocol(client_protocol: int) -> None:
    """Raises ProtocolMismatch when client and daemon are more than one version apart."""
    if abs(client_protocol - PROTOCOL_VERSION) <= 1 and client_protocol > 0:
        return
    older = "client" if client_protocol < PROTOCOL_VERSION else "daemon"
    raise ProtocolMismatch(
        f"the client speaks protocol {client_protocol}, the daemon {PROTOCOL_VERSION}: "
        f"upgrade the {older}"
    )


def spec_from(message: pb.NamespaceSpec, tenant: str, owner: str) -> NamespaceSpec:
    """The validated spec of this owner's namespace; raises BadRequest. The tenant is the socket's,
    never the client's."""
    if message.tenant not in ("", tenant):
        raise BadRequest("namespace fact 'tenant' is the daemon's to fill: leave it empty")
    spec = NamespaceSpec(
        model=message.model,
        weights=message.weights,
        kv_dtype=message.kv_dtype,
        layout=message.layout,
        block_tokens=message.block_tokens,
        shard_bytes=message.shard_bytes,
        hash_bytes=message.hash_bytes,
        shard_count=message.shard_count,
        parallel=message.parallel,
        kv_group=message.kv_group,
        attention=message.attention,
        hash_algorithm=message.hash_algorithm,
        hash_seed=message.hash_seed,
        tenant=owner,
        salt=message.salt,
        extra=dict(message.extra),
        chained=not message.unchained,
    )
    spec.validate()
    return spec


def check_packed(packed: bytes, hash_bytes: int) -> int:
    """How many hashes are packed here; raises BadRequest."""
    if len(packed) > HASHES_BYTES_MAX:
        raise BadRequest(f"hashes have {len(packed)} bytes: at most {HASHES_BYTES_MAX} a call")
    count, rest = divmod(len(packed), hash_bytes)
    if rest:
        raise BadRequest(
            f"hashes have {len(packed)} bytes, no multiple of the namespace's {hash_bytes}"
        )
    return count


def unpack_hashes(packed: bytes, hash_bytes: int) -> list[BlockHash]:
    """Raises BadRequest when the length is wrong."""
    check_packed(packed, hash_bytes)
    return [
        BlockHash(packed[first : first + hash_bytes]) for first in range(0, len(packed), hash_bytes)
    ]


def slots_from(values: Iterable[int]) -> Slots:
    return np.fromiter(values, np.uint32)


def tier_counts(tiers: Iterable[tuple[TierName, int]]) -> list[pb.TierCount]:
    return [pb.TierCount(tier=tier, count=count) for tier, count in tiers]
