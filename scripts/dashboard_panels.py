"""The panels of the dashboards; scripts/dashboards.py writes them where Grafana reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """`queries`: legend and expression. `moves`: it grows when the load does."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    text: str = ""
    moves: bool = False


def rate(metric: str, labels: str = "", by: str = "") -> str:
    return f"sum{_by(by)}(rate({metric}{_labels(labels)}[$__rate_interval]))"


def now(metric: str, labels: str = "", by: str = "") -> str:
    return f"sum{_by(by)}({metric}{_labels(labels)})"


def quantile(share: float, metric: str, labels: str = "") -> str:
    return f"histogram_quantile({share:g}, {rate(metric + '_bucket', labels, 'le')})"


def ratio(part: str, whole: str) -> str:
    return f"{part} / {whole}"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""


def _labels(labels: str) -> str:
    return "{" + ", ".join(filter(None, ('instance=~"$instance"', labels))) + "}"


ACQUIRE = 'call="acquire"'
NAMESPACE = 'namespace=~"$namespace"'
NAMED_ACQUIRE = f"{NAMESPACE}, {ACQUIRE}"
ASKED = rate("kvtier_asked_blocks_total", ACQUIRE)
HIT_RATIO = ratio(rate("kvtier_hit_blocks_total", ACQUIRE), ASKED)
SAVED = f"{rate('kvtier_saved_seconds_total')} - {rate('kvtier_lost_seconds_total')}"


def both(metric: str, labels: str = "", prefix: str = "") -> tuple[tuple[str, str], ...]:
    """The median and the slowest in a hundred."""
    return tuple(
        (f"{prefix}{name}", quantile(share, metric, labels))
        for name, share in (("median", 0.5), ("p99", 0.99))
    )


def moved(direction: str) -> tuple[tuple[str, str], ...]:
    tiers = {
        "nvme": "kvtier_transfer_seconds",
        "cxl": "kvtier_cxl_transfer_seconds",
        "remote": "kvtier_remote_transfer_seconds",
    }
    labels = f'direction="{direction}"'
    return tuple((tier, quantile(0.99, metric, labels)) for tier, metric in tiers.items())


OVERVIEW = (
    Panel(
        "Hit ratio",
        "percentunit",
        (("of blocks asked for", HIT_RATIO),),
        'Blocks leased of those that engines asked for. Low with many misses "evicted": the '
        'tiers are too small; low with "unseen": prompts share little.',
    ),
    Panel(
        "Time saved, each second",
        "s",
        (("TTFT saved", SAVED),),
        "Time to first token that engines say was saved, less what onboards cost them that were "
        "slower than computing. 1: as much as one GPU that does nothing but prefill.",
        True,
    ),
    Panel(
        "Time saved since the start",
        "s",
        (("saved", now("kvtier_saved_seconds_total")), ("lost", now("kvtier_lost_seconds_total"))),
    ),
    Panel(
        "Hits by tier",
        "percentunit",
        (
            (
                "{{tier}}",
                ratio(
                    rate("kvtier_hit_blocks_total", ACQUIRE, "tier"), f"on () group_left () {ASKED}"
                ),
            ),
        ),
    ),
    Panel(
        "Misses by reason",
        "blocks/s",
        (("{{reason}}", rate("kvtier_miss_reason_blocks_total", ACQUIRE, "reason")),),
        "",
        True,
    ),
    Panel(
        "Bytes onboarded, by tier",
        "Bps",
        (("{{tier}}", rate("kvtier_hit_bytes_total", "", "tier")),),
        "",
        True,
    ),
    Panel(
        "Blocks offloaded and evicted",
        "blocks/s",
        (
            ("offloaded", rate("kvtier_committed_blocks_total", 'outcome="ready"')),
            ("evicted from memory", rate("kvtier_evicted_blocks_total")),
        ),
        "",
        True,
    ),
    Panel(
        "Memory in use",
        "percentunit",
        (
            (
                "dram",
                ratio(
                    now("kvtier_tier_slots", 'tier="dram", state=~"ready|reserved|held"'),
                    now("kvtier_tier_slots", 'tier="dram", state=~"free|ready|reserved|held"'),
                ),
            ),
        ),
        "Of the slots that namespaces have. Full is normal; see what is evicted.",
    ),
    Panel(
        "Engines",
        "none",
        (("sessions", now("kvtier_sessions", 'state="live"')), ("leases", now("kvtier_leases"))),
    ),
)
TIERS = (
    Panel("Blocks by tier", "none", (("{{tier}}", now("kvtier_tier_blocks", "", "tier")),)),
    Panel("Budget by tier", "bytes", (("{{tier}}", now("kvtier_tier_budget_bytes", "", "tier")),)),
    Panel(
        "Slots in memory, by state",
        "none",
        (("{{state}}", now("kvtier_tier_slots", 'tier="dram"', "state")),),
    ),
    Panel("Match", "s", both("kvtier_call_seconds", 'method="Match"')),
    Panel(
        "Acquire",
        "s",
        (
            *both("kvtier_acquire_seconds", 'waited="no"', "from memory, "),
            *both("kvtier_acquire_seconds", 'waited="yes"', "waited, "),
        ),
    ),
    Panel(
        "Calls",
        "reqps",
        (
            (
                "{{method}}",
                rate(
                    "kvtier_call_seconds_count", 'method=~"Match|Acquire|Reserve|Commit"', "method"
                ),
            ),
        ),
        "",
        True,
    ),
    Panel("Promote, p99 of a batch", "s", moved("promote")),
    Panel("Demote, p99 of a batch", "s", moved("demote")),
    Panel(
        "NVMe, one call of the kernel",
        "s",
        (
            *both("kvtier_nvme_io_seconds", 'direction="read"', "read, "),
            *both("kvtier_nvme_io_seconds", 'direction="write"', "write, "),
        ),
    ),
    Panel(
        "Blocks promoted",
        "blocks/s",
        (
            (
                "nvme",
                rate("kvtier_transferred_blocks_total", 'direction="promote", outcome="done"'),
            ),
            (
                "cxl",
                rate("kvtier_cxl_transferred_blocks_total", 'direction="promote", outcome="done"'),
            ),
            (
                "remote",
                rate(
                    "kvtier_remote_transferred_blocks_total", 'direction="promote", outcome="done"'
                ),
            ),
        ),
        "",
        True,
    ),
    Panel(
        "Blocks demoted",
        "blocks/s",
        (
            ("nvme", rate("kvtier_transferred_blocks_total", 'direction="demote", outcome="done"')),
            (
                "cxl",
                rate("kvtier_cxl_transferred_blocks_total", 'direction="demote", outcome="done"'),
            ),
            (
                "remote",
                rate(
                    "kvtier_remote_transferred_blocks_total", 'direction="demote", outcome="done"'
                ),
            ),
        ),
    ),
    Panel(
        "NVMe bytes",
        "Bps",
        (
            ("read", rate("kvtier_nvme_read_bytes_total")),
            ("written, {{content}}", rate("kvtier_nvme_written_bytes_total", "", "content")),
        ),
    ),
    Panel(
        "NVMe wear",
        "bytes",
        (
            ("written in 24 h", now("kvtier_nvme_day_written_bytes")),
            ("endurance of a day", now("kvtier_nvme_day_endurance_bytes")),
            ("written for a hit", now("kvtier_nvme_hit_written_bytes")),
        ),
    ),
    Panel(
        "Queues",
        "none",
        (
            ("to nvme and back", now("kvtier_transfer_blocks")),
            ("may go down", now("kvtier_demote_waiting_blocks")),
            ("nvme, for a thread", now("kvtier_nvme_queue_transfers")),
            ("for a checksum", now("kvtier_checksum_queue_slots")),
            ("acquires that wait", now("kvtier_waiting_leases")),
        ),
    ),
    Panel(
        "Remote troubles",
        "ops",
        (("{{reason}}", rate("kvtier_remote_troubles_total", "", "reason")),),
    ),
)
NAMESPACES = (
    Panel(
        "Blocks asked for",
        "blocks/s",
        (
            (
                "{{namespace}}",
                rate("kvtier_namespace_asked_blocks_total", NAMED_ACQUIRE, "namespace"),
            ),
        ),
        "",
        True,
    ),
    Panel(
        "Hit ratio",
        "percentunit",
        (
            (
                "{{namespace}}",
                ratio(
                    rate("kvtier_namespace_hit_blocks_total", NAMED_ACQUIRE, "namespace"),
                    rate("kvtier_namespace_asked_blocks_total", NAMED_ACQUIRE, "namespace"),
                ),
            ),
        ),
    ),
    Panel(
        "Hits by tier",
        "blocks/s",
        (
            (
                "{{namespace}} {{tier}}",
                rate(
                    "kvtier_namespace_hit_blocks_total",
                    NAMED_ACQUIRE,
                    "namespace, tier",
                ),
            ),
        ),
        "",
        True,
    ),
    Panel(
        "Misses by reason",
        "blocks/s",
        (
            (
                "{{namespace}} {{reason}}",
                rate(
                    "kvtier_namespace_miss_blocks_total",
                    NAMED_ACQUIRE,
                    "namespace, reason",
                ),
            ),
        ),
        "",
        True,
    ),
    Panel(
        "Bytes onboarded",
        "Bps",
        (("{{namespace}}", rate("kvtier_namespace_hit_bytes_total", NAMESPACE, "namespace")),),
        "",
        True,
    ),
    Panel(
        "Resident",
        "bytes",
        (("{{namespace}}", now("kvtier_namespace_resident_bytes", NAMESPACE, "namespace")),),
    ),
    Panel(
        "Resident blocks",
        "none",
        (("{{namespace}}", now("kvtier_namespace_resident_blocks", NAMESPACE, "namespace")),),
    ),
    Panel(
        "Names used",
        "percentunit",
        (
            (
                "of those the metrics have room for",
                ratio(
                    now("kvtier_limit_used", 'limit="namespace_names"'),
                    now("kvtier_limit_max", 'limit="namespace_names"'),
                ),
            ),
        ),
    ),
)
HEALTH = (
    Panel(
        "Daemons",
        "none",
        (("answering", 'sum(up{instance=~"$instance"})'), ("draining", now("kvtier_draining"))),
    ),
    Panel("Uptime", "s", (("{{instance}}", now("kvtier_uptime_seconds", "", "instance")),)),
    Panel(
        "Nearness of limits",
        "percentunit",
        (
            (
                "{{limit}}",
                f"max by (limit) (kvtier_limit_used{_labels('')} / kvtier_limit_max{_labels('')})",
            ),
        ),
    ),
    Panel(
        "Oldest lease",
        "s",
        (("age", f"max(kvtier_oldest_lease_seconds{_labels('')})"),),
        "Much above the copy of a long prompt: an engine hangs in mid-copy.",
    ),
    Panel(
        "Slots withheld",
        "none",
        (("{{state}}", now("kvtier_tier_slots", 'state=~"quarantined|held"', "state")),),
    ),
    Panel("Sessions by state", "none", (("{{state}}", now("kvtier_sessions", "", "state")),)),
    Panel("Lag of the event loop", "s", both("kvtier_loop_lag_seconds")),
    Panel("Slices of the core", "s", both("kvtier_core_slice_seconds")),
    Panel(
        "Calls by outcome",
        "reqps",
        (("{{outcome}}", rate("kvtier_calls_total", "", "outcome")),),
        "",
        True,
    ),
    Panel(
        "Things that should not happen",
        "ops",
        (
            ("corrupt blocks", rate("kvtier_corrupt_blocks_total")),
            ("frames refused", rate("kvtier_frame_errors_total")),
            ("slices over 5 ms", rate("kvtier_core_long_slices_total")),
            ("events lost", rate("kvtier_watch_lost_events_total")),
        ),
    ),
    Panel(
        "State of the tiers",
        "none",
        (
            ("nvme {{state}}", f"max by (state) (kvtier_nvme_state{_labels('')}) > 0"),
            ("cxl {{state}}", f"max by (state) (kvtier_cxl_state{_labels('')}) > 0"),
            (
                "remote {{side}} {{state}}",
                f"max by (side, state) (kvtier_remote_state{_labels('')}) > 0",
            ),
        ),
    ),
)
