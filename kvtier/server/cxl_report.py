"""What the daemon says of its CXL tier: gauges, and its row in Stats."""

from __future__ import annotations

from kvtier.core.stats import LowerCounts
from kvtier.metrics.labels import CXL_STATES
from kvtier.server.base import Base
from kvtier.server.cxl_tier import CxlKeeper
from kvtier.server.tier_rows import note_counts, tier_row
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
            metrics.cxl.state.labels(state).set(state == present)
        if keeper is None:
            return
        metrics.cxl.emulated.set(keeper.is_emulated)
        metrics.cxl.direct.set(keeper.is_direct)
        metrics.state.tier_budget_bytes.labels(CXL).set(keeper.budget_bytes)
        metrics.state.tier_populated_bytes.labels(CXL).set(keeper.populated_bytes)
        if counts is not None:
            note_counts(metrics, self.tier, counts)

    def tier_stats(self, counts: LowerCounts | None) -> list[pb.TierStats]:
        keeper = self._keeper
        if keeper is None:
            return []
        row = tier_row(
            self.tier,
            counts,
            budget_bytes=keeper.budget_bytes,
            populated_bytes=keeper.populated_bytes,
            memory=f"{keeper.label}, mapped by engines" if keeper.is_direct else keeper.label,
        )
        return [row]
