"""Every metric, declared once: name, kind, help, and labels from closed sets.

`python -m kvtier.metrics` prints docs/metrics.md. Reconcilable by design: for each call,
hits of all tiers + misses = blocks asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from kvtier.types import CommitOutcome, Cut, TierName

METHODS = [
    "Greet",
    "Match",
    "Acquire",
    "Release",
    "Reserve",
    "Commit",
    "Abort",
    "Prefetch",
    "Put",
    "Get",
    "Hint",
    "Evict",
    "Pin",
    "Clear",
    "Drain",
    "Check",
    "Stats",
    "Watch",
]
LIMITS = (
    *("sessions", "namespaces", "watchers", "puts", "calls", "leases_per_session"),
    *("leased_bytes", "file_descriptors"),
)
SLOT_STATES = ["free", "ready", "reserved", "quarantined", "pinned", "held"]
SESSION_STATES = ["live", "lost", "ended", "dead"]
BLOCK_CALLS = ("match", "acquire", "get")
ACQUIRE_WAITS = ("no", "yes")
DIRECTIONS = ("put", "get")
TRANSFERS = ("demote", "promote")
TRANSFER_OUTCOMES = ("done", "corrupt", "failed", "refused")
NVME_STATES = ("absent", "recovering", "on", "read_only", "off")
OUTCOMES = [
    "ok",
    "cancelled",
    "failed",
    "BadRequest",
    "BadFrame",
    "ProtocolMismatch",
    "Unauthenticated",
    "Forbidden",
    "UnknownNamespace",
    "NotReserved",
    "TierFull",
    "LimitExceeded",
    "Draining",
    "CorruptReplica",
]
FRAME_ERRORS = [
    "BadFrame",
    "BadRequest",
    "ProtocolMismatch",
    "ClockUncertain",
    "Unauthenticated",
    "Forbidden",
    "LimitExceeded",
    "UnknownNamespace",
    "Draining",
    "other",
]
TIERS = tuple(str(tier) for tier in TierName)
BREAKER_STATES = ("absent", "closed", "open", "half_open")
# Why a call to a remote engine was trouble, or a value was not believed.
REMOTE_TROUBLES = (
    *("timed_out", "unreachable", "full", "refused", "busy", "failed"),
    *("short", "magic", "version", "torn_header", "namespace", "epoch", "hash", "shape", "length"),
    *("torn", "codec", "checksum"),
)
CXL_STATES = ("absent", "populating", "on", "off")
BUILT_TIERS = tuple(str(tier) for tier in TierName)

_SECONDS_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.5, 2.5)
_SLICE_SECONDS_MAX = 0.005


@dataclass(frozen=True, slots=True)
class Declared:
    """What docs/metrics.md says of one metric."""

    name: str
    kind: str
    help: str
    labels: Mapping[str, Sequence[str]]


class Metrics:
    """The daemon's own registry. Written on the event loop only."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # Three lines a counter less.
        self.registry = CollectorRegistry(auto_describe=False)
        self.declared: list[Declared] = []
        self._followed: dict[Counter, int] = {}
        self._declare_blocks()
        self._declare_calls()
        self._declare_state()
        self._declare_transfers()
        self._declare_nvme()
        self._declare_cxl()
        self._declare_remote()

    def _declare_blocks(self) -> None:
        calls = {"call": BLOCK_CALLS}
        asked = self._counter(
            "kvtier_asked_blocks_total", "Blocks asked for, by the call that asked.", calls
        )
        hits = self._counter(
            "kvtier_hit_blocks_total",
            "Of these, resident (match) or leased (acquire, get), by tier.",
            {**calls, "tier": TIERS},
        )
        misses = self._counter(
            "kvtier_miss_blocks_total", "Of these, not resident, in doubt or cut.", calls
        )
        # Bound children: `labels` costs more than the increment on the hot path.
        self._asked = {call: asked.labels(call) for call in BLOCK_CALLS}
        self._hits = {(c, t): hits.labels(c, t) for c in BLOCK_CALLS for t in TIERS}
        self._misses = {call: misses.labels(call) for call in BLOCK_CALLS}
        self.acquire_cuts = self._counter(
            "kvtier_acquire_cuts_total",
            "Acquire calls by what ended the leased prefix.",
            {"cut": [cut.name.lower() for cut in Cut]},
        )
        self.reserved_slots = self._counter(
            "kvtier_reserved_slots_total", "Slots reserved by engines and by put.", {}
        )
        self.aborted_slots = self._counter(
            "kvtier_aborted_slots_total", "Reserved slots given back unfilled.", {}
        )
        self.committed_blocks = self._counter(
            "kvtier_committed_blocks_total",
            "Blocks committed, by outcome.",
            {"outcome": [outcome.name.lower() for outcome in CommitOutcome]},
        )
        self.by_value_bytes = self._counter(
            "kvtier_by_value_bytes_total",
            "Payload moved over gRPC.",
            {"direction": DIRECTIONS},
        )
        self.corrupt_blocks = self._counter(
            "kvtier_corrupt_blocks_total",
            "Blocks dropped because their bytes were not those committed. Anything above 0 means "
            "that an engine writes where it must not, or that memory fails.",
            {},
        )
        self.checksummed_blocks = self._counter(
            "kvtier_checksummed_blocks_total", "Blocks whose checksum was computed.", {}
        )

    def _declare_calls(self) -> None:
        self.calls = self._counter(
            "kvtier_calls_total",
            "gRPC calls ended, by method and outcome (the error's name, or ok).",
            {"method": METHODS, "outcome": OUTCOMES},
            prefill=False,
        )
        seconds = self._histogram(
            "kvtier_call_seconds",
            "Time in the daemon of gRPC calls, by method.",
            {"method": METHODS},
        )
        self.call_seconds = {method: seconds.labels(method) for method in METHODS}
        acquire_seconds = self._histogram(
            "kvtier_acquire_seconds",
            "Of these, Acquire: answered from what is in memory, or after a wait for more of it.",
            {"waited": ACQUIRE_WAITS},
        )
        self.acquire_seconds = {one: acquire_seconds.labels(one) for one in ACQUIRE_WAITS}
        self.loop_lag_seconds = self._histogram(
            "kvtier_loop_lag_seconds",
            "How late the event loop is, ten times a second: what a call waits for before the "
            "daemon looks at it.",
            {},
        )
        self.slice_seconds = self._histogram(
            "kvtier_core_slice_seconds", "Time one slice of the core held the event loop.", {}
        )
        self.long_slices = self._counter(
            "kvtier_core_long_slices_total", "Slices of the core over 5 ms.", {}
        )
        self.frame_errors = self._counter(
            "kvtier_frame_errors_total",
            "Frames of the session socket answered with an error, by its name.",
            {"error": FRAME_ERRORS},
        )
        self.watch_lost_events = self._counter(
            "kvtier_watch_lost_events_total", "Events dropped because a watcher was slow.", {}
        )

    def _declare_state(self) -> None:
        tier = {"tier": BUILT_TIERS}
        self.tier_budget_bytes = self._gauge("kvtier_tier_budget_bytes", "Budget.", tier)
        self.tier_populated_bytes = self._gauge(
            "kvtier_tier_populated_bytes", "Of these, memory whose pages exist, or disk.", tier
        )
        self.tier_slots = self._gauge(
            "kvtier_tier_slots",
            "Slots by state; quarantined and pinned ones are held, reserved or ready as well.",
            {**tier, "state": SLOT_STATES},
        )
        self.resident_blocks = self._gauge(
            "kvtier_resident_blocks", "Resident blocks of all namespaces, each once.", {}
        )
        self.tier_blocks = self._gauge(
            "kvtier_tier_blocks", "Blocks that have a replica in the tier.", tier
        )
        self._evicted_blocks = self._counter(
            "kvtier_evicted_blocks_total", "Blocks evicted from memory.", {}
        )
        self.sessions = self._gauge(
            "kvtier_sessions", "Sessions by state.", {"state": SESSION_STATES}
        )
        self.leases = self._gauge("kvtier_leases", "Leases held.", {})
        self.slabs = self._gauge(
            "kvtier_slabs", "Slabs by use.", {"use": ("stock", "bound", "pending")}
        )
        self.checksum_queue_slots = self._gauge(
            "kvtier_checksum_queue_slots", "Blocks that wait for their checksum.", {}
        )
        self.limit_used = self._gauge(
            "kvtier_limit_used",
            "How much of a limit is used; compare kvtier_limit_max.",
            {"limit": LIMITS},
        )
        self.limit_max = self._gauge("kvtier_limit_max", "The limit itself.", {"limit": LIMITS})
        self.draining = self._gauge("kvtier_draining", "1 while new work is refused.", {})
        self.uptime_seconds = self._gauge("kvtier_uptime_seconds", "Time since start.", {})

    def _declare_transfers(self) -> None:
        direction = {"direction": TRANSFERS}
        self.transferred_blocks = self._counter(
            "kvtier_transferred_blocks_total",
            "Blocks moved between tiers, by outcome. corrupt: when demoted, somebody wrote into "
            "memory that was committed; when promoted, the disk gave other bytes than it got, as "
            "after a power cut.",
            {**direction, "outcome": TRANSFER_OUTCOMES},
        )
        seconds = self._histogram(
            "kvtier_transfer_seconds", "Time of one batch, from asked for to returned.", direction
        )
        self.transfer_seconds = {one: seconds.labels(one) for one in TRANSFERS}
        self.transfer_blocks = self._gauge(
            "kvtier_transfer_blocks", "Blocks under way between tiers.", direction
        )
        self.demote_waiting_blocks = self._gauge(
            "kvtier_demote_waiting_blocks", "Blocks that may go down and have not begun to.", {}
        )
        self.nvme_unwritten_bytes = self._gauge(
            "kvtier_nvme_unwritten_table_bytes",
            "Of the slot table, newer in memory than on the disk: a kill now would lose blocks "
            "that went down since (nvme.table_seconds).",
            {},
        )

    def _declare_remote(self) -> None:
        self.remote_transferred_blocks = self._counter(
            "kvtier_remote_transferred_blocks_total",
            "Blocks put into the remote engine (demote) and got from it (promote). refused: slow, "
            "full, gone or off; what is there is remembered. failed: it was not there any more. "
            "corrupt: its bytes were not those that were asked for.",
            {"direction": TRANSFERS, "outcome": TRANSFER_OUTCOMES},
        )
        self.remote_found_blocks = self._counter(
            "kvtier_remote_found_blocks_total",
            "Blocks found in the remote engine that this daemon did not know of.",
            {},
        )
        self.remote_epochs = self._gauge(
            "kvtier_remote_epochs_count",
            "Namespaces whose epoch among the nodes is known here; for the others the tier is off.",
            {},
        )
        self.remote_state = self._gauge(
            "kvtier_remote_state",
            "1 for the state of the remote tier's breaker: open, the engine is left alone for a "
            "while; half_open, one call is tried.",
            {"side": ("read", "write"), "state": BREAKER_STATES},
        )
        self._remote_troubles = self._counter(
            "kvtier_remote_troubles_total",
            "Calls to the remote engine that ended in trouble, and values not believed, by reason.",
            {"reason": REMOTE_TROUBLES},
        )

    def _declare_cxl(self) -> None:
        direction = {"direction": TRANSFERS}
        self.cxl_transferred_blocks = self._counter(
            "kvtier_cxl_transferred_blocks_total",
            "Blocks copied between DRAM and the CXL tier. corrupt: somebody wrote into either.",
            {**direction, "outcome": ("done", "corrupt")},
        )
        seconds = self._histogram(
            "kvtier_cxl_transfer_seconds",
            "Time of one batch to or from the CXL tier, from asked for to returned.",
            direction,
        )
        self.cxl_transfer_seconds = {one: seconds.labels(one) for one in TRANSFERS}
        self.cxl_emulated = self._gauge(
            "kvtier_cxl_emulated_info", "1 while the CXL tier is ordinary memory, slowed down.", {}
        )
        self.cxl_state = self._gauge(
            "kvtier_cxl_state",
            "1 for the state that the CXL tier is in: off when it has got no memory at all.",
            {"state": CXL_STATES},
        )

    def _declare_nvme(self) -> None:
        self.nvme_state = self._gauge(
            "kvtier_nvme_state",
            "1 for the state that the NVMe tier is in: read_only after an error of a disk, off "
            "when one is gone or its slot table cannot be read.",
            {"state": NVME_STATES},
        )
        self.nvme_written_bytes = self._counter(
            "kvtier_nvme_written_bytes_total", "Written to NVMe.", {"content": ("blocks", "table")}
        )
        self.nvme_read_bytes = self._counter(
            "kvtier_nvme_read_bytes_total", "Blocks read from NVMe.", {}
        )
        self.nvme_queue_transfers = self._gauge(
            "kvtier_nvme_queue_transfers", "Reads and writes that wait for a thread.", {}
        )
        self.nvme_segments = self._gauge(
            "kvtier_nvme_segments", "Segments by state.", {"state": ("free", "bound")}
        )
        self.nvme_reused_segments = self._counter(
            "kvtier_nvme_reused_segments_total", "Segments begun anew.", {}
        )
        self.nvme_dropped_blocks = self._counter(
            "kvtier_nvme_dropped_blocks_total", "Blocks lost to the reuse of their segment.", {}
        )
        self.nvme_reinserted_blocks = self._counter(
            "kvtier_nvme_reinserted_blocks_total",
            "Blocks written again before their segment was reused, since they were used.",
            {},
        )
        self.nvme_recovered_blocks = self._gauge(
            "kvtier_nvme_recovered_blocks", "Blocks that the pool held at start.", {}
        )
        self.nvme_recovery_seconds = self._gauge(
            "kvtier_nvme_recovery_seconds", "Time to read the slot table at start.", {}
        )
        self.nvme_write_budget_bytes = self._gauge(
            "kvtier_nvme_write_budget_bytes",
            "What may be written down now (nvme.write_bytes_per_hour).",
            {},
        )
        self.nvme_day_written_bytes = self._gauge(
            "kvtier_nvme_day_written_bytes",
            "Written in the last 24 hours, as far as this daemon has lived.",
            {},
        )
        self.nvme_day_endurance_bytes = self._gauge(
            "kvtier_nvme_day_endurance_bytes", "nvme.endurance_bytes_per_day.", {}
        )
        self.nvme_hit_written_bytes = self._gauge(
            "kvtier_nvme_hit_written_bytes",
            "Written since start for each block leased from NVMe (acquire, get): the price of a "
            "hit. 0 before the first.",
            {},
        )

    # ----------------------------------------------------------------------------- taking note

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

    def note_slice(self, seconds: float) -> None:
        self.slice_seconds.observe(seconds)
        if seconds > _SLICE_SECONDS_MAX:
            self.long_slices.inc()

    def note_call(self, method: str, outcome: str, seconds: float) -> None:
        self.calls.labels(method, outcome).inc()
        self.call_seconds[method].observe(seconds)

    def note_outcomes(self, outcomes: bytes) -> None:
        for outcome in CommitOutcome:
            if count := outcomes.count(outcome.value):
                self.committed_blocks.labels(outcome.name.lower()).inc(count)

    def note_evicted(self, evicted_count: int) -> None:
        """The core's count since start."""
        self._follow(self._evicted_blocks, evicted_count)

    def note_reuse(self, *, reused_count: int, dropped_count: int, reinserted_count: int) -> None:
        """Likewise."""
        self._follow(self.nvme_reused_segments, reused_count)
        self._follow(self.nvme_dropped_blocks, dropped_count)
        self._follow(self.nvme_reinserted_blocks, reinserted_count)

    def note_remote_troubles(self, troubles: Mapping[str, int]) -> None:
        """Likewise, by reason."""
        for reason, count in troubles.items():
            self._follow(self._remote_troubles.labels(reason), count)

    def hit_count(self, call: str, tier: TierName) -> int:
        """Blocks hit since start."""
        samples = [one for family in self._hits[call, tier].collect() for one in family.samples]
        return int(sum(one.value for one in samples if one.name.endswith("_total")))

    def text(self) -> bytes:
        """What /metrics answers."""
        return generate_latest(self.registry)

    def samples(self) -> dict[str, float]:
        """The same as a mapping: `name{label="value"}` -> value."""
        found = {}
        for family in self.registry.collect():
            for sample in family.samples:
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    # --------------------------------------------------------------------------------- helpers

    def _follow(self, counter: Counter, count: int) -> None:
        """Bring the counter to a count that somebody else keeps."""
        counter.inc(count - self._followed.get(counter, 0))
        self._followed[counter] = count

    def _counter(
        self, name: str, text: str, labels: Mapping[str, Sequence[str]], *, prefill: bool = True
    ) -> Counter:
        self.declared.append(Declared(name, "counter", text, labels))
        # prometheus_client adds "_total" itself.
        made = Counter(name.removesuffix("_total"), text, tuple(labels), registry=self.registry)
        if prefill and len(labels) == 1:
            for value in next(iter(labels.values())):
                made.labels(value)
        return made

    def _gauge(self, name: str, text: str, labels: Mapping[str, Sequence[str]]) -> Gauge:
        self.declared.append(Declared(name, "gauge", text, labels))
        return Gauge(name, text, tuple(labels), registry=self.registry)

    def _histogram(self, name: str, text: str, labels: Mapping[str, Sequence[str]]) -> Histogram:
        self.declared.append(Declared(name, "histogram", text, labels))
        return Histogram(
            name, text, tuple(labels), buckets=_SECONDS_BUCKETS, registry=self.registry
        )


def documentation() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m kvtier.metrics`; do not edit.",
        "",
        "Served at `/metrics` of the admin address; `kvtier stats` shows the same values.",
        "Labels come from closed sets. For each `call`, the sum of `kvtier_hit_blocks_total` over",
        "the tiers plus `kvtier_miss_blocks_total` equals `kvtier_asked_blocks_total`.",
        "",
        "| metric | kind | labels | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for one in Metrics().declared:
        labels = "; ".join(f"`{name}`: {', '.join(values)}" for name, values in one.labels.items())
        lines.append(f"| `{one.name}` | {one.kind} | {labels or '–'} | {one.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(documentation())
