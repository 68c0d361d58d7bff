"""The NVMe tier: its state, its disks, its segments and its wear."""

from __future__ import annotations

from contextlib import AbstractContextManager

from kvtier.metrics.labels import NVME_STATES
from kvtier.metrics.registry import Registry


class NvmeMetrics:
    """The NVMe tier: its state, its disks, its segments and its wear."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.state = registry.gauge(
            "kvtier_nvme_state",
            "1 for the state that the NVMe tier is in: read_only after an error of a disk, off "
            "when one is gone or its slot table cannot be read.",
            {"state": NVME_STATES},
        )
        self.written_bytes = registry.counter(
            "kvtier_nvme_written_bytes_total", "Written to NVMe.", {"content": ("blocks", "table")}
        )
        self.read_bytes = registry.counter(
            "kvtier_nvme_read_bytes_total", "Blocks read from NVMe.", {}
        )
        seconds = registry.histogram(
            "kvtier_nvme_io_seconds",
            "Time of one call of the kernel that reads or writes NVMe, without what waits for a "
            "thread (kvtier_transfer_seconds has that, too).",
            {"direction": ("read", "write")},
        )
        self._io_seconds = {one: seconds.labels(one) for one in ("read", "write")}
        self.queue_transfers = registry.gauge(
            "kvtier_nvme_queue_transfers", "Reads and writes that wait for a thread.", {}
        )
        self.segments = registry.gauge(
            "kvtier_nvme_segments", "Segments by state.", {"state": ("free", "bound")}
        )
        self.reused_segments = registry.counter(
            "kvtier_nvme_reused_segments_total", "Segments begun anew.", {}
        )
        self.dropped_blocks = registry.counter(
            "kvtier_nvme_dropped_blocks_total", "Blocks lost to the reuse of their segment.", {}
        )
        self.reinserted_blocks = registry.counter(
            "kvtier_nvme_reinserted_blocks_total",
            "Blocks written again before their segment was reused, since they were used.",
            {},
        )
        self._refused_blocks = registry.counter(
            "kvtier_nvme_refused_blocks_total",
            "Blocks that were not written, for they are not likely enough to be used again.",
            {},
        )
        self.recovered_blocks = registry.gauge(
            "kvtier_nvme_recovered_blocks", "Blocks that the pool held at start.", {}
        )
        self.recovery_seconds = registry.gauge(
            "kvtier_nvme_recovery_seconds", "Time to read the slot table at start.", {}
        )
        self._declare_wear(registry)

    def _declare_wear(self, registry: Registry) -> None:
        self.write_budget_bytes = registry.gauge(
            "kvtier_nvme_write_budget_bytes",
            "What may be written down now (nvme.write_bytes_per_hour).",
            {},
        )
        self.day_written_bytes = registry.gauge(
            "kvtier_nvme_day_written_bytes",
            "Written in the last 24 hours, as far as this daemon has lived.",
            {},
        )
        self.day_endurance_bytes = registry.gauge(
            "kvtier_nvme_day_endurance_bytes", "nvme.endurance_bytes_per_day.", {}
        )
        self.hit_written_bytes = registry.gauge(
            "kvtier_nvme_hit_written_bytes",
            "Written since start for each block leased from NVMe (acquire, get): the price of a "
            "hit. 0 before the first.",
            {},
        )

    def time_call(self, direction: str) -> AbstractContextManager[object]:
        """Around one read or write, in any thread."""
        return self._io_seconds[direction].time()

    def note_refused(self, refused_count: int) -> None:
        """The core's count since start."""
        self._registry.follow(self._refused_blocks, refused_count)

    def note_reuse(self, *, reused_count: int, dropped_count: int, reinserted_count: int) -> None:
        """Likewise."""
        self._registry.follow(self.reused_segments, reused_count)
        self._registry.follow(self.dropped_blocks, dropped_count)
        self._registry.follow(self.reinserted_blocks, reinserted_count)
