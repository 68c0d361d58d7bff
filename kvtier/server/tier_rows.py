"""What all tiers below memory say alike: their row in Stats, their gauges of slots and blocks."""

from __future__ import annotations

from kvtier.core.stats import LowerCounts
from kvtier.metrics import Metrics
from kvtier.types import TierName
from kvtier.v1 import kvtier_pb2 as pb


def tier_row(
    tier: TierName,
    counts: LowerCounts | None,
    *,
    budget_bytes: int,
    populated_bytes: int = 0,
    memory: str = "",
) -> pb.TierStats:
    """Slots have the size of their namespace's blocks, so that none can be counted as free.

    Without counts: the core knows nothing of the tier yet.
    """
    row = pb.TierStats(
        tier=str(tier), budget_bytes=budget_bytes, populated_bytes=populated_bytes, memory=memory
    )
    if counts is not None:
        row.slot_count = counts.slot_count + counts.demoting_count
        row.ready_count = counts.slot_count
        row.reserved_count = counts.demoting_count
        row.pinned_count = counts.promoting_count + counts.leased_count
    return row


def note_counts(metrics: Metrics, tier: TierName, counts: LowerCounts) -> None:
    name = str(tier)
    metrics.state.tier_slots.labels(name, "ready").set(counts.slot_count)
    metrics.state.tier_slots.labels(name, "reserved").set(counts.demoting_count)
    metrics.state.tier_slots.labels(name, "pinned").set(
        counts.promoting_count + counts.leased_count
    )
    metrics.state.tier_blocks.labels(name).set(counts.block_count)
