"""Counts the core can tell at any moment; no history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.policy.eviction import GuardReport
from kvtier.types import EngineId, NamespaceId, Role, SessionId, TierName


@dataclass(frozen=True, slots=True)
class NamespaceCounts:
    namespace: NamespaceId
    epoch: int
    block_count: int
    slot_count: int  # Free, ready, reserved and held together.
    free_count: int
    ready_count: int
    reserved_count: int
    quarantined_count: int  # Of sessions that ended; part of reserved_count, once void of held.
    leased_count: int
    held_count: int
    slot_bytes: int
    shard_count: int


@dataclass(frozen=True, slots=True)
class SessionCounts:
    session: SessionId
    engine: EngineId
    role: Role
    state: str  # "live", "lost" or "dead".
    by_value: bool
    reserved_count: int
    lease_count: int


@dataclass(frozen=True, slots=True)
class LowerCounts:
    """A tier below memory; `_count`s of what has happened are since start."""

    segment_count: int
    free_segment_count: int
    slot_count: int  # Slots that hold a block.
    block_count: int  # Blocks with a replica here, whatever else they have.
    demoting_count: int  # Blocks under way.
    promoting_count: int
    waiting_demote_count: int  # Blocks that may go down and have not begun to.
    budget_bytes_left: int  # Of what may be written now.
    written_bytes: int
    reinserted_count: int  # Blocks written again because their segment was reused.
    reused_segment_count: int
    dropped_count: int  # Blocks that reuse has ended.
    refused_count: int = 0  # Blocks that were not worth their write.
    leased_count: int = 0  # Slots under direct leases, each as often as leased.


@dataclass(frozen=True, slots=True)
class ManagerStats:
    namespaces: tuple[NamespaceCounts, ...]
    sessions: tuple[SessionCounts, ...]
    lease_count: int
    leased_bytes: int
    slab_stock_count: int
    slab_bound_count: int
    slab_count_max: int
    evicted_count: int  # Since start.
    draining: bool
    # Of the tiers below memory that there are and that have been read, the fastest first.
    lower: Mapping[TierName, LowerCounts] = field(default_factory=dict)
    oldest_lease_at: float | None = None  # When the oldest lease held began.
    guards: tuple[GuardReport, ...] = ()  # Of namespaces whose policy has one.

    @property
    def nvme(self) -> LowerCounts | None:
        return self.lower.get(TierName.NVME)
