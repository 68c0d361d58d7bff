"""The CXL tier."""

from __future__ import annotations

from kvtier.metrics.labels import CXL_STATES, TRANSFERS
from kvtier.metrics.registry import Registry


class CxlMetrics:
    """The CXL tier."""

    def __init__(self, registry: Registry) -> None:
        direction = {"direction": TRANSFERS}
        self.transferred_blocks = registry.counter(
            "kvtier_cxl_transferred_blocks_total",
            "Blocks copied between DRAM and the CXL tier. corrupt: there was none any more.",
            {**direction, "outcome": ("done", "corrupt")},
        )
        seconds = registry.histogram(
            "kvtier_cxl_transfer_seconds",
            "Time of one batch to or from the CXL tier, from asked for to returned.",
            direction,
        )
        self.transfer_seconds = {one: seconds.labels(one) for one in TRANSFERS}
        self.emulated = registry.gauge(
            "kvtier_cxl_emulated_info", "1 while the CXL tier is ordinary memory, slowed down.", {}
        )
        self.direct = registry.gauge(
            "kvtier_cxl_direct_info",
            "1 while engines that have mapped the CXL tier copy blocks from it themselves.",
            {},
        )
        self.direct_blocks = registry.counter(
            "kvtier_cxl_direct_blocks_total",
            "Blocks leased to engines as they lie in the CXL tier.",
            {},
        )
        self.state = registry.gauge(
            "kvtier_cxl_state",
            "1 for the state that the CXL tier is in: off when it has got no memory at all.",
            {"state": CXL_STATES},
        )
