"""KV cache events for routers."""

from __future__ import annotations

from kvtier.metrics.registry import Registry


class EventMetrics:
    """All 0 where no events are published."""

    def __init__(self, registry: Registry) -> None:
        self.waiting_blocks = registry.gauge(
            "kvtier_kv_events_waiting_blocks",
            "Blocks in KV cache events that wait to be sent (kv_events.queue_blocks_max).",
            {},
        )
        self.lost_blocks = registry.counter(
            "kvtier_kv_events_lost_blocks_total",
            "Blocks in KV cache events that were dropped because too many waited; what is there "
            "is announced anew after that.",
            {},
        )
        self.announced_count = registry.counter(
            "kvtier_kv_events_announced_total",
            "Times that everything of a model was announced anew, as hashes alone.",
            {},
        )
