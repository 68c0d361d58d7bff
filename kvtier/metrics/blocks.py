"""Blocks asked for, reserved, committed and dropped."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.metrics.labels import BLOCK_CALLS, DIRECTIONS, TIERS
from kvtier.metrics.registry import Registry
from kvtier.types import CommitOutcome, Cut, TierName


class BlockMetrics:
    """Blocks asked for, reserved, committed and dropped."""

    def __init__(self, registry: Registry) -> None:
        calls = {"call": BLOCK_CALLS}
        asked = registry.counter(
            "kvtier_asked_blocks_total", "Blocks asked for, by the call that asked.", calls
        )
        hits = registry.counter(
            "kvtier_hit_blocks_total",
            "Of these, resident (match) or leased (acquire, get), by tier.",
            {**calls, "tier": TIERS},
        )
        misses = registry.counter(
            "kvtier_miss_blocks_total", "Of these, not resident, in doubt or cut.", calls
        )
        # Bound children: `labels` costs more than the increment on the hot path.
        self._asked = {call: asked.labels(call) for call in BLOCK_CALLS}
        self._hits = {(c, t): hits.labels(c, t) for c in BLOCK_CALLS for t in TIERS}
        self._misses = {call: misses.labels(call) for call in BLOCK_CALLS}
        self.acquire_cuts = registry.counter(
            "kvtier_acquire_cuts_total",
            "Acquire calls by what ended the leased prefix.",
            {"cut": [cut.name.lower() for cut in Cut]},
        )
        self.reserved_slots = registry.counter(
            "kvtier_reserved_slots_total", "Slots reserved by engines and by put.", {}
        )
        self.aborted_slots = registry.counter(
            "kvtier_aborted_slots_total", "Reserved slots given back unfilled.", {}
        )
        self.committed_blocks = registry.counter(
            "kvtier_committed_blocks_total",
            "Blocks committed, by outcome.",
            {"outcome": [outcome.name.lower() for outcome in CommitOutcome]},
        )
        self.by_value_bytes = registry.counter(
            "kvtier_by_value_bytes_total",
            "Payload moved over gRPC.",
            {"direction": DIRECTIONS},
        )
        self.corrupt_blocks = registry.counter(
            "kvtier_corrupt_blocks_total",
            "Blocks dropped because their bytes were not those committed. Anything above 0 means "
            "that an engine writes where it must not, or that memory fails.",
            {},
        )
        self.checksummed_blocks = registry.counter(
            "kvtier_checksummed_blocks_total", "Blocks whose checksum was computed.", {}
        )

    def note_blocks(
        self, call: str, asked_count: int, tiers: Iterable[tuple[TierName, int]]
    ) -> None:
        """A call asked for blocks; `tiers` says where it found how many."""
        self._asked[call].inc(asked_count)
        for tier, count in tiers:
            if count:
                self._hits[call, tier].inc(count)
                asked_count -= count
        assert asked_count >= 0, "more hits than blocks asked for"
        if asked_count:
            self._misses[call].inc(asked_count)

    def note_outcomes(self, outcomes: bytes) -> None:
        for outcome in CommitOutcome:
            if count := outcomes.count(outcome.value):
                self.committed_blocks.labels(outcome.name.lower()).inc(count)

    def hit_count(self, call: str, tier: TierName) -> int:
        """Blocks hit since start."""
        samples = [one for family in self._hits[call, tier].collect() for one in family.samples]
        return int(sum(one.value for one in samples if one.name.endswith("_total")))
