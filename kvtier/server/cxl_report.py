"""What the daemon says of its CXL tier: gauges, and its row in Stats."""

from __future__ import annotations

from kvtier.core.stats import LowerCounts
from kvtier.metrics import CXL_STATES
from kvtier.server.base import Base
from kvtier.server.cxl_tier import CxlKeeper
from kvtier.types import TierName
from kvtier.v1 import kvtier_pb2 as pb

CXL = str(TierName.CXL)


class CxlReport:
    """Belongs to the event loop; says `absent` when there is no CXL tier."""

    tier = TierName.CXL

    def __init__(self, base: Base, keeper: CxlKeeper | None) -> None:
        self._metrics = base.metrics
        self._keeper = keeper

    def refresh(self, counts: LowerCounts | None) -> None:
        keeper, metrics = self._keeper, self._metrics
        present = "absent" if keeper is None else keeper.state
        for state in CXL_STATES:
            metrics.cxl_state.labels(state).set(state == present)
        if keeper is None:
            return
        metrics.cxl_emulated.set(keeper.is_emulated)
        metrics.tier_budget_bytes.labels(CXL).set(keeper.budget_bytes)
        metrics.tier_populated_bytes.labels(CXL).set(keeper.populated_bytes)
        if counts is not None:
            metrics.tier_slots.labels(CXL, "ready").set(counts.slot_count)
            metrics.tier_slots.labels(CXL, "reserved").set(counts.demoting_count)
            metrics.tier_slots.labels(CXL, "pinned").set(counts.promoting_count)
            metrics.tier_blocks.labels(CXL).set(counts.block_count)

    def tier_stats(self, counts: LowerCounts | None) -> list[pb.TierStats]:
        """Slots have the size of their namespace's blocks, so that none can be counted as free."""
        keeper = self._keeper
        if keeper is None:
            return []
        tier = pb.TierStats(
            tier=CXL,
            budget_bytes=keeper.budget_bytes,
            populated_bytes=keeper.populated_bytes,
            memory=keeper.label,
        )
        if counts is not None:
            tier.slot_count = counts.slot_count + counts.demoting_count
            tier.ready_count = counts.slot_count
            tier.reserved_count = counts.demoting_count
            tier.pinned_count = counts.promoting_count
        return [tier]
