"""What the daemon holds now, and how near its limits are."""

from __future__ import annotations

from kvtier.metrics.labels import (
    BUILT_TIERS,
    EVICTION_ORDERS,
    LIMITS,
    SESSION_STATES,
    SHADOW_ORDERS,
    SLOT_STATES,
)
from kvtier.metrics.registry import Registry


class StateMetrics:
    """What the daemon holds now, and how near its limits are."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        tier = {"tier": BUILT_TIERS}
        self.tier_budget_bytes = registry.gauge("kvtier_tier_budget_bytes", "Budget.", tier)
        self.tier_populated_bytes = registry.gauge(
            "kvtier_tier_populated_bytes", "Of these, memory whose pages exist, or disk.", tier
        )
        self.tier_slots = registry.gauge(
            "kvtier_tier_slots",
            "Slots by state; quarantined and pinned ones are held, reserved or ready as well.",
            {**tier, "state": SLOT_STATES},
        )
        self.resident_blocks = registry.gauge(
            "kvtier_resident_blocks", "Resident blocks of all namespaces, each once.", {}
        )
        self.tier_blocks = registry.gauge(
            "kvtier_tier_blocks", "Blocks that have a replica in the tier.", tier
        )
        self._evicted_blocks = registry.counter(
            "kvtier_evicted_blocks_total", "Blocks evicted from memory.", {}
        )
        self.eviction_orders = registry.gauge(
            "kvtier_eviction_order_count",
            "Namespaces whose policy learns, by how they evict: as learned; by age, as the guard "
            "finds that better; as learned and unguarded, for there are too few blocks to sample.",
            {"order": EVICTION_ORDERS},
        )
        self.shadow_hit_blocks = registry.gauge(
            "kvtier_shadow_hit_blocks",
            "Blocks of sampled chains that the guards' shadow caches had, by how these evict.",
            {"order": SHADOW_ORDERS},
        )
        self.sessions = registry.gauge(
            "kvtier_sessions", "Sessions by state.", {"state": SESSION_STATES}
        )
        self.leases = registry.gauge("kvtier_leases", "Leases held.", {})
        self.oldest_lease_seconds = registry.gauge(
            "kvtier_oldest_lease_seconds",
            "Age of the oldest lease held; much above the copy of a long prompt: an engine hangs "
            "in mid-copy, and what it holds cannot be evicted before the deadline.",
            {},
        )
        self.waiting_leases = registry.gauge(
            "kvtier_waiting_leases", "Leases asked for that wait for a promotion.", {}
        )
        self.slabs = registry.gauge(
            "kvtier_slabs", "Slabs by use.", {"use": ("stock", "bound", "pending")}
        )
        self.checksum_queue_slots = registry.gauge(
            "kvtier_checksum_queue_slots", "Blocks that wait for their checksum.", {}
        )
        self.limit_used = registry.gauge(
            "kvtier_limit_used",
            "How much of a limit is used; compare kvtier_limit_max.",
            {"limit": LIMITS},
        )
        self.limit_max = registry.gauge("kvtier_limit_max", "The limit itself.", {"limit": LIMITS})
        self.draining = registry.gauge("kvtier_draining", "1 while new work is refused.", {})
        self.uptime_seconds = registry.gauge("kvtier_uptime_seconds", "Time since start.", {})

    def note_evicted(self, evicted_count: int) -> None:
        """The core's count since start."""
        self._registry.follow(self._evicted_blocks, evicted_count)
