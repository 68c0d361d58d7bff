"""What the daemon says of itself: Stats and /metrics, from one set of numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import Metric

from kvtier.core.stats import LowerCounts, ManagerStats, NamespaceCounts, SessionCounts
from kvtier.metrics.labels import LIMITS, SESSION_STATES
from kvtier.policy.eviction import EvictionOrder, GuardReport
from kvtier.server.base import Base
from kvtier.server.namespaces import OpenedNamespace
from kvtier.server.security import Peer, Rights
from kvtier.server.sessions import Sessions
from kvtier.server.slabs import SlabKeeper
from kvtier.types import PROTOCOL_VERSION, NamespaceId, TierName
from kvtier.v1 import kvtier_pb2 as pb
from kvtier.version import VERSION

# A namespace that is idle and empty for so long makes room for another name in the metrics.
IDLE_SECONDS = 3600.0
NAME_CHARS_MAX = 64
DRAM = str(TierName.DRAM)


@dataclass(frozen=True, slots=True)
class Limit:
    """How near a limit is; `used` is asked when somebody wants to know."""

    name: str
    max_count: int
    used: Callable[[], int]


class TierReport(Protocol):
    """What a tier below memory says of itself."""

    tier: TierName

    def refresh(self, counts: LowerCounts | None) -> None:
        """Set its gauges; without counts while the core knows nothing of it."""
        ...

    def tier_stats(self, counts: LowerCounts | None) -> list[pb.TierStats]:
        """Its row; none where there is no such tier."""
        ...


class Reporter:
    """Refreshes the gauges and puts the answers together; belongs to the event loop."""

    def __init__(
        self,
        base: Base,
        sessions: Sessions,
        slabs: SlabKeeper,
        lower: Sequence[TierReport],
        *,
        generation: int,
        page_kind: str,
    ) -> None:
        self._core = base.core
        self._namespaces = base.namespaces
        self._sessions = sessions
        self._slabs = slabs
        self._lower = lower
        self._clock = base.clock
        self._metrics = base.metrics
        self._generation = generation
        self._page_kind = page_kind
        self._started_at = base.clock.now()
        self._limits: list[Limit] = []
        self._asked: dict[NamespaceId, tuple[int, float]] = {}  # How many blocks, and since when.
        base.namespaces.tell_opened(self._name)

    def set_limits(self, limits: list[Limit]) -> None:
        assert {one.name for one in limits} <= set(LIMITS), "a limit that was not declared"
        self._limits = limits

    def gather(self) -> list[Metric]:
        """All metrics of this moment; `text_of` them elsewhere."""
        self._refresh()
        return self._metrics.registry.gather()

    def stats_response(self, peer: Peer) -> pb.StatsResponse:
        """Everything for the operator; else what is the peer's tenant's own."""
        stats = self._refresh()
        if peer.rights is not Rights.OPERATOR:
            return self._stats_of_tenant(stats, peer.tenant)
        return pb.StatsResponse(
            daemon_version=VERSION,
            protocol=PROTOCOL_VERSION,
            generation=self._generation,
            uptime_seconds=self._clock.now() - self._started_at,
            draining=stats.draining,
            tiers=[
                self._dram_stats(stats),
                *(
                    tier
                    for report in self._lower
                    for tier in report.tier_stats(stats.lower.get(report.tier))
                ),
            ],
            namespaces=[self._namespace_stats(one) for one in stats.namespaces],
            sessions=self._session_stats(stats.sessions),
            counters=self._metrics.samples(),
        )

    def _stats_of_tenant(self, stats: ManagerStats, tenant: str) -> pb.StatsResponse:
        """As if there were nobody else. Counters of the whole daemon tell of others: of those it
        has none but its namespaces' own."""
        seen = {one.id for one in self._namespaces.seen_by(tenant)}
        mine = [one for one in stats.namespaces if one.namespace in seen]
        sessions = [
            one for one in stats.sessions if self._sessions.tenant_of(one.session) == tenant
        ]
        bound_bytes = sum(one.slot_count * one.slot_bytes * one.shard_count for one in mine)
        names = {f'namespace="{_name_of(self._namespaces.get(one))}"' for one in seen}
        counters = {
            name: value
            for name, value in self._metrics.samples().items()
            if any(one in name for one in names)
        }
        return pb.StatsResponse(
            daemon_version=VERSION,
            protocol=PROTOCOL_VERSION,
            generation=self._generation,
            uptime_seconds=self._clock.now() - self._started_at,
            draining=stats.draining,
            tiers=[self._tier_stats(mine, self._slabs.budget_bytes, bound_bytes)],
            namespaces=[self._namespace_stats(one) for one in mine],
            sessions=self._session_stats(sessions),
            counters=counters,
        )

    def _tier_stats(
        self, namespaces: Sequence[NamespaceCounts], budget_bytes: int, populated_bytes: int
    ) -> pb.TierStats:
        return pb.TierStats(
            tier=DRAM,
            budget_bytes=budget_bytes,
            populated_bytes=populated_bytes,
            slot_count=sum(one.slot_count for one in namespaces),
            free_count=sum(one.free_count for one in namespaces),
            ready_count=sum(one.ready_count for one in namespaces),
            reserved_count=sum(one.reserved_count for one in namespaces),
            quarantined_count=sum(one.quarantined_count for one in namespaces),
            pinned_count=sum(one.leased_count for one in namespaces),
            held_count=sum(one.held_count for one in namespaces),
            page_kind=self._page_kind,
        )

    def _namespace_stats(self, counts: NamespaceCounts) -> pb.NamespaceStats:
        opened = self._namespaces.get(counts.namespace)
        return pb.NamespaceStats(
            namespace_id=counts.namespace,
            model=opened.spec.model,
            fingerprint=opened.fingerprint,
            epoch=counts.epoch,
            block_count=counts.block_count,
            block_bytes=opened.payload_bytes,
            slot_count=counts.slot_count,
            free_count=counts.free_count,
            salt=opened.spec.salt,
            tenant=opened.spec.tenant,
        )

    def _dram_stats(self, stats: ManagerStats) -> pb.TierStats:
        slabs = self._slabs
        return self._tier_stats(stats.namespaces, slabs.budget_bytes, slabs.populated_bytes)

    def _session_stats(self, sessions: Sequence[SessionCounts]) -> list[pb.SessionStats]:
        names = dict(self._sessions.names())
        return [
            pb.SessionStats(
                session_id=one.session,
                name=names.get(one.session, ""),
                role=one.role.name.lower(),
                state=one.state,
                reserved_count=one.reserved_count,
                lease_count=one.lease_count,
                engine_id=one.engine,
                by_value=one.by_value,
            )
            for one in sessions
        ]

    def _refresh(self) -> ManagerStats:
        stats = self._core.stats()
        metrics = self._metrics
        tier = self._dram_stats(stats)
        metrics.state.tier_budget_bytes.labels(DRAM).set(tier.budget_bytes)
        metrics.state.tier_populated_bytes.labels(DRAM).set(tier.populated_bytes)
        for state, count in {
            "free": tier.free_count,
            "ready": tier.ready_count,
            "reserved": tier.reserved_count,
            "quarantined": tier.quarantined_count,
            "pinned": tier.pinned_count,
            "held": tier.held_count,
        }.items():
            metrics.state.tier_slots.labels(DRAM, state).set(count)
        metrics.state.tier_blocks.labels(DRAM).set(tier.ready_count)
        metrics.state.resident_blocks.set(sum(one.block_count for one in stats.namespaces))
        metrics.state.note_evicted(stats.evicted_count)
        self._refresh_guards(stats.guards)
        for state in SESSION_STATES:
            metrics.state.sessions.labels(state).set(
                sum(one.state == state for one in stats.sessions)
            )
        metrics.state.leases.set(stats.lease_count)
        now, oldest_at = self._clock.now(), stats.oldest_lease_at
        metrics.state.oldest_lease_seconds.set(0.0 if oldest_at is None else now - oldest_at)
        self._refresh_namespaces(stats, now)
        self._refresh_tenants(stats)
        pending_count = stats.slab_count_max - stats.slab_bound_count - stats.slab_stock_count
        metrics.state.slabs.labels("stock").set(stats.slab_stock_count)
        metrics.state.slabs.labels("bound").set(stats.slab_bound_count)
        metrics.state.slabs.labels("pending").set(pending_count)
        metrics.state.draining.set(stats.draining)
        metrics.state.uptime_seconds.set(self._clock.now() - self._started_at)
        for limit in self._limits:
            metrics.state.limit_max.labels(limit.name).set(limit.max_count)
            metrics.state.limit_used.labels(limit.name).set(limit.used())
        for report in self._lower:
            report.refresh(stats.lower.get(report.tier))
        return stats

    def _refresh_tenants(self, stats: ManagerStats) -> None:
        held: dict[str, int] = {}
        for one in stats.namespaces:
            tenant = self._namespaces.get(one.namespace).spec.tenant
            length_bytes = one.slot_count * one.slot_bytes * one.shard_count
            held[tenant] = held.get(tenant, 0) + length_bytes
        if any(held):  # One without a name alone is no news.
            for tenant, length_bytes in held.items():
                self._metrics.tenants.memory_bytes.labels(tenant).set(length_bytes)

    def _refresh_guards(self, guards: Sequence[GuardReport]) -> None:
        state = self._metrics.state
        for order in EvictionOrder:
            count = sum(one.order is order for one in guards)
            state.eviction_orders.labels(order.value).set(count)
        for order, hit_count in (
            (EvictionOrder.LEARNED, sum(one.learned_hit_count for one in guards)),
            (EvictionOrder.BY_AGE, sum(one.by_age_hit_count for one in guards)),
        ):
            state.shadow_hit_blocks.labels(order.value).set(hit_count)

    def _name(self, opened: OpenedNamespace) -> None:
        self._metrics.blocks.asked.name(opened.id, _name_of(opened), opened.payload_bytes)

    def _refresh_namespaces(self, stats: ManagerStats, now: float) -> None:
        """Tell what is resident; forget who has nothing and has asked for nothing for long."""
        asked = self._metrics.blocks.asked
        resident = {one.namespace: one.block_count for one in stats.namespaces}
        asked.note_resident((one, count) for one, count in resident.items() if count)
        for namespace, count in asked.asked_counts().items():
            known_count, since = self._asked.get(namespace, (-1, now))
            if count != known_count or resident.get(namespace, 0):
                self._asked[namespace] = count, now
            elif now - since >= IDLE_SECONDS:
                del self._asked[namespace]
                asked.forget(namespace)


def _name_of(opened: OpenedNamespace) -> str:
    return f"{opened.spec.model[:NAME_CHARS_MAX]}@{opened.fingerprint.hex()[:8]}"


def open_fd_count() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
