"""What the daemon says of its NVMe tier: gauges, and its row in Stats."""

from __future__ import annotations

from kvtier.core.stats import LowerCounts
from kvtier.layout import PAD_BYTES
from kvtier.metrics.labels import NVME_STATES, TRANSFERS
from kvtier.server.base import Base
from kvtier.server.nvme import NvmeKeeper
from kvtier.server.tier_rows import note_counts, tier_row
from kvtier.types import TierName
from kvtier.v1 import kvtier_pb2 as pb

NVME = str(TierName.NVME)
_LEASING_CALLS = ("acquire", "get")


class NvmeReport:
    """Belongs to the event loop; says `absent` when there is no NVMe tier."""

    tier = TierName.NVME

    def __init__(self, base: Base, keeper: NvmeKeeper | None) -> None:
        self._clock = base.clock
        self._metrics = base.metrics
        self._keeper = keeper

    def refresh(self, counts: LowerCounts | None) -> None:
        keeper, metrics = self._keeper, self._metrics
        present = "absent" if keeper is None else keeper.state
        for state in NVME_STATES:
            metrics.nvme.state.labels(state).set(state == present)
        if keeper is None:
            return
        metrics.state.tier_budget_bytes.labels(NVME).set(keeper.capacity_bytes)
        metrics.state.tier_populated_bytes.labels(NVME).set(keeper.capacity_bytes)
        metrics.nvme.queue_transfers.set(keeper.queued_count)
        metrics.transfers.nvme_unwritten_bytes.set(keeper.dirty_page_count * PAD_BYTES)
        for direction in TRANSFERS:
            metrics.transfers.blocks.labels(direction).set(keeper.block_counts[direction])
        metrics.nvme.recovered_blocks.set(keeper.recovered_count)
        metrics.nvme.recovery_seconds.set(keeper.recovery_seconds)
        self._refresh_wear(keeper)
        if counts is not None:
            self._refresh_counts(counts)

    def tier_stats(self, counts: LowerCounts | None) -> list[pb.TierStats]:
        if self._keeper is None:
            return []
        capacity = self._keeper.capacity_bytes
        return [tier_row(self.tier, counts, budget_bytes=capacity, populated_bytes=capacity)]

    def _refresh_counts(self, counts: LowerCounts) -> None:
        metrics = self._metrics
        note_counts(metrics, self.tier, counts)
        metrics.transfers.demote_waiting_blocks.set(counts.waiting_demote_count)
        metrics.nvme.segments.labels("free").set(counts.free_segment_count)
        bound_count = counts.segment_count - counts.free_segment_count
        metrics.nvme.segments.labels("bound").set(bound_count)
        metrics.nvme.write_budget_bytes.set(max(0, counts.budget_bytes_left))
        metrics.nvme.note_refused(counts.refused_count)
        metrics.nvme.note_reuse(
            reused_count=counts.reused_segment_count,
            dropped_count=counts.dropped_count,
            reinserted_count=counts.reinserted_count,
        )

    def _refresh_wear(self, keeper: NvmeKeeper) -> None:
        metrics = self._metrics
        day_bytes = keeper.wear.day_bytes(now=self._clock.now())
        metrics.nvme.day_written_bytes.set(day_bytes)
        metrics.nvme.day_endurance_bytes.set(keeper.endurance_bytes_per_day)
        hit_count = sum(
            metrics.blocks.asked.hit_count(call, TierName.NVME) for call in _LEASING_CALLS
        )
        metrics.nvme.hit_written_bytes.set(
            keeper.wear.written_bytes / hit_count if hit_count else 0
        )
