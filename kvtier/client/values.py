"""What the client's calls take and give back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.errors import KVTierError
from kvtier.namespace import NamespaceSpec
from kvtier.types import Cut, TierName

Slots = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]
DIRECT_SLOTS = 1 << 32
"""Slots of a lease from this number on lie in segments of the CXL tier; they are read only. The
numbers are the client's own: on the wire a byte beside each slot says so."""


@dataclass(frozen=True, slots=True)
class SessionRef:
    """Names the session that slots and leases were given under; void once it is lost."""

    generation: int
    session_id: int  # 0 for a by-value session, which is never given any.


@dataclass(frozen=True, slots=True)
class NamespaceState:
    """What the daemon said when it opened the namespace for the current session."""

    namespace_id: int
    fingerprint: bytes
    epoch: int
    slot_bytes: int  # Distance of two slots of one shard's arena; 0 where no fds are passed.
    session: SessionRef
    token: bytes = field(repr=False)
    segment_shard_bytes: int = 0  # Distance of two shards of one block in a segment.
    wants_token_ids: bool = False  # With what is committed: the daemon publishes events.


class Namespace:
    """Handle of one namespace; the client re-opens it at each reconnect."""

    def __init__(self, spec: NamespaceSpec, about: int) -> None:
        self.spec = spec
        self.about = about  # Names it in the frames of the session socket.
        self.block_bytes = spec.shard_bytes * spec.shard_count
        # Each is replaced as a whole by the session's thread, and read without a lock.
        self.state: NamespaceState | None = None
        self.error: KVTierError | None = None  # Why the daemon refuses it.

    def __repr__(self) -> str:
        return f"Namespace({self.spec.model!r}, state={self.state!r})"


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks that stay where they are until `deadline_ns` (CLOCK_MONOTONIC) or Release."""

    lease_id: int | None  # None: nothing could be leased.
    session: SessionRef
    leased_count: int  # Blocks from the first one on, skip_count included.
    slots: Slots  # Of the leased blocks after the first skip_count ones.
    deadline_ns: int
    cut: Cut
    tiers: tuple[tuple[TierName, int], ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots to fill and commit, or to abort; perhaps fewer than asked for, even none."""

    session: SessionRef
    slots: npt.NDArray[np.uint32]
    epoch: int
    stock_count_max: int


@dataclass(frozen=True, slots=True)
class PutResult:
    ready_count: int
    present_count: int
    refused_count: int


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    memory_count: int
    promoting_count: int


@dataclass(frozen=True, slots=True)
class EvictResult:
    evicted_count: int
    kept_count: int
