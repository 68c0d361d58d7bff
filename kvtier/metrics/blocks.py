"""Blocks asked for, reserved, committed and dropped."""

from __future__ import annotations

from kvtier.metrics.asked import AskedMetrics
from kvtier.metrics.labels import DIRECTIONS
from kvtier.metrics.registry import Registry
from kvtier.types import CommitOutcome, Cut


class BlockMetrics:
    """Blocks asked for, reserved, committed and dropped."""

    def __init__(self, registry: Registry) -> None:
        self.asked = AskedMetrics(registry)
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
        self.saved_seconds = registry.counter(
            "kvtier_saved_seconds_total",
            "Time to the first token that engines say was saved: what the blocks onboarded would "
            "have taken at the rate of their recent prefills, less the time from the question to "
            "the last copy. Of each onboard that was worth it.",
            {},
        )
        self.lost_seconds = registry.counter(
            "kvtier_lost_seconds_total",
            "The same of each onboard that took longer than computing would have. Take it from "
            "the time saved; if it is not far below that, tiers are slow or prefixes short.",
            {},
        )

    def note_release(self, prefill_seconds: float, onboard_seconds: float) -> None:
        """An engine's word for what it onboarded: computing it would have taken so long at its
        recent rate, and onboarding it did take so long."""
        won = prefill_seconds - onboard_seconds
        (self.saved_seconds if won > 0 else self.lost_seconds).inc(abs(won))

    def note_outcomes(self, outcomes: bytes) -> None:
        for outcome in CommitOutcome:
            if count := outcomes.count(outcome.value):
                self.committed_blocks.labels(outcome.name.lower()).inc(count)
