"""The remote tier."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.metrics.labels import BREAKER_STATES, REMOTE_TROUBLES, TRANSFER_OUTCOMES, TRANSFERS
from kvtier.metrics.registry import Registry


class RemoteMetrics:
    """The remote tier."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.transferred_blocks = registry.counter(
            "kvtier_remote_transferred_blocks_total",
            "Blocks put into the remote engine (demote) and got from it (promote). refused: slow, "
            "full, gone or off; what is there is remembered. failed: it was not there any more. "
            "corrupt: its bytes were not those that were asked for.",
            {"direction": TRANSFERS, "outcome": TRANSFER_OUTCOMES},
        )
        seconds = registry.histogram(
            "kvtier_remote_transfer_seconds",
            "Time of one batch to or from the remote engine, from asked for to returned.",
            {"direction": TRANSFERS},
        )
        self.transfer_seconds = {one: seconds.labels(one) for one in TRANSFERS}
        self.found_blocks = registry.counter(
            "kvtier_remote_found_blocks_total",
            "Blocks found in the remote engine that this daemon did not know of.",
            {},
        )
        self.epochs = registry.gauge(
            "kvtier_remote_epochs_count",
            "Namespaces whose epoch among the nodes is known here; for the others the tier is off.",
            {},
        )
        self.state = registry.gauge(
            "kvtier_remote_state",
            "1 for the state of the remote tier's breaker: open, the engine is left alone for a "
            "while; half_open, one call is tried.",
            {"side": ("read", "write"), "state": BREAKER_STATES},
        )
        self._remote_troubles = registry.counter(
            "kvtier_remote_troubles_total",
            "Calls to the remote engine that ended in trouble, and values not believed, by reason.",
            {"reason": REMOTE_TROUBLES},
        )

        self._refused_blocks = registry.counter(
            "kvtier_remote_refused_blocks_total",
            "Blocks that were not put, for they are not likely enough to be used again.",
            {},
        )
        self.write_budget_bytes = registry.gauge(
            "kvtier_remote_write_budget_bytes",
            "What may be put now (remote.write_bytes_per_hour). 10^17 or more: no bound.",
            {},
        )

    def note_refused(self, refused_count: int) -> None:
        """The core's count since start."""
        self._registry.follow(self._refused_blocks, refused_count)

    def note_troubles(self, troubles: Mapping[str, int]) -> None:
        """Likewise, by reason."""
        for reason, count in troubles.items():
            self._registry.follow(self._remote_troubles.labels(reason), count)
