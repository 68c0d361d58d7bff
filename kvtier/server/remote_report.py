"""What the daemon says of its remote tier: gauges, and its row in Stats."""

from __future__ import annotations

from kvtier.core.stats import LowerCounts
from kvtier.metrics.labels import BREAKER_STATES
from kvtier.server.base import Base
from kvtier.server.remote_tier import RemoteKeeper
from kvtier.server.tier_rows import note_counts, tier_row
from kvtier.types import TierName
from kvtier.v1 import kvtier_pb2 as pb

REMOTE = str(TierName.REMOTE)


class RemoteReport:
    """Belongs to the event loop; says `absent` when there is no remote tier."""

    tier = TierName.REMOTE

    def __init__(self, base: Base, keeper: RemoteKeeper | None) -> None:
        self._metrics = base.metrics
        self._keeper = keeper

    def refresh(self, counts: LowerCounts | None) -> None:
        keeper, metrics = self._keeper, self._metrics
        sides = {"read": "absent", "write": "absent"}
        if keeper is not None:
            engine = keeper.parts.engine
            sides = {"read": str(engine.reading_state), "write": str(engine.writing_state)}
        for side, present in sides.items():
            for state in BREAKER_STATES:
                metrics.remote.state.labels(side, state).set(state == present)
        if keeper is None:
            return
        metrics.state.tier_budget_bytes.labels(REMOTE).set(keeper.known_bytes_max)
        metrics.remote.epochs.set(keeper.epoch_count)
        metrics.remote.note_troubles(keeper.parts.engine.troubles)
        if counts is not None:
            note_counts(metrics, self.tier, counts)
            metrics.remote.write_budget_bytes.set(max(0, counts.budget_bytes_left))
            metrics.remote.note_refused(counts.refused_count)

    def tier_stats(self, counts: LowerCounts | None) -> list[pb.TierStats]:
        """What this daemon knows to be there; the engine's own size is the engine's business."""
        keeper = self._keeper
        if keeper is None:
            return []
        return [
            tier_row(self.tier, counts, budget_bytes=keeper.known_bytes_max, memory=keeper.name)
        ]
