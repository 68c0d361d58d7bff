"""Blocks on their way between memory and NVMe."""

from __future__ import annotations

from kvtier.metrics.labels import TRANSFER_OUTCOMES, TRANSFERS
from kvtier.metrics.registry import Registry


class TransferMetrics:
    """Blocks on their way between memory and NVMe."""

    def __init__(self, registry: Registry) -> None:
        direction = {"direction": TRANSFERS}
        self.transferred_blocks = registry.counter(
            "kvtier_transferred_blocks_total",
            "Blocks moved between tiers, by outcome. corrupt: when demoted, somebody wrote into "
            "memory that was committed; when promoted, the disk gave other bytes than it got, as "
            "after a power cut.",
            {**direction, "outcome": TRANSFER_OUTCOMES},
        )
        seconds = registry.histogram(
            "kvtier_transfer_seconds", "Time of one batch, from asked for to returned.", direction
        )
        self.seconds = {one: seconds.labels(one) for one in TRANSFERS}
        self.blocks = registry.gauge(
            "kvtier_transfer_blocks", "Blocks under way between tiers.", direction
        )
        self.demote_waiting_blocks = registry.gauge(
            "kvtier_demote_waiting_blocks", "Blocks that may go down and have not begun to.", {}
        )
        self.nvme_unwritten_bytes = registry.gauge(
            "kvtier_nvme_unwritten_table_bytes",
            "Of the slot table, newer in memory than on the disk: a kill now would lose blocks "
            "that went down since (nvme.table_seconds).",
            {},
        )
