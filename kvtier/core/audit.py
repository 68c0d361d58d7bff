"""Looking at the manager's state from outside: counts for people, violations for tests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvtier.core.demotions import Demotions
from kvtier.core.engines import DAEMON_SESSION, EngineTable, Session
from kvtier.core.leases import LeaseTable
from kvtier.core.lower_tier import LowerTier
from kvtier.core.promotions import Promotions
from kvtier.core.replica import ReplicaState
from kvtier.core.residency import Residency
from kvtier.core.slabs import SlabLedger
from kvtier.core.stats import LowerCounts, ManagerStats, NamespaceCounts, SessionCounts
from kvtier.policy.eviction import GuardedPolicy
from kvtier.types import NamespaceId, TierName

Namespaces = Mapping[NamespaceId, Residency]


def gather_stats(
    namespaces: Namespaces,
    engines: EngineTable,
    leases: LeaseTable,
    ledger: SlabLedger,
    *,
    lower: Mapping[TierName, LowerCounts],
    draining: bool,
) -> ManagerStats:
    return ManagerStats(
        namespaces=tuple(_namespace_counts(one, engines) for one in namespaces.values()),
        sessions=tuple(_session_counts(one, namespaces, leases) for one in engines.sessions()),
        lease_count=len(leases),
        leased_bytes=sum(one.leased_bytes for one in namespaces.values()),
        slab_stock_count=len(ledger.stock),
        slab_bound_count=ledger.bound_count,
        slab_count_max=ledger.slab_count_max,
        evicted_count=sum(one.evicted_count for one in namespaces.values()),
        draining=draining,
        lower=lower,
        oldest_lease_at=leases.oldest_at(),
        guards=tuple(
            one.policy.guard_report()
            for one in namespaces.values()
            if isinstance(one.policy, GuardedPolicy)
        ),
    )


def lower_counts(lower: LowerTier, demotions: Demotions, promotions: Promotions) -> LowerCounts:
    """Of a tier that is open."""
    book = lower.book
    ready_count = book.ready_count
    return LowerCounts(
        segment_count=book.segment_count,
        free_segment_count=book.free_segment_count,
        slot_count=ready_count,
        block_count=ready_count,
        demoting_count=demotions.under_way_count,
        promoting_count=promotions.under_way_count_of(lower.tier),
        waiting_demote_count=demotions.waiting_count,
        budget_bytes_left=int(demotions.budget.left_bytes),
        written_bytes=demotions.written_bytes,
        reinserted_count=demotions.retiring.again_count,
        reused_segment_count=demotions.retiring.reused_count,
        dropped_count=demotions.retiring.dropped_count,
        refused_count=demotions.refused_count,
        leased_count=lower.leased_count,
    )


def find_violations(
    namespaces: Namespaces, engines: EngineTable, leases: LeaseTable, ledger: SlabLedger
) -> list[str]:
    """What is wrong, one line each."""
    found = engines.check_invariants() + ledger.check_invariants()
    pins = {}
    for namespace, residency in namespaces.items():
        found.extend(residency.check_invariants())
        found.extend(
            f"slots are reserved by session {session}, which is forgotten"
            for session in residency.tier.reserved_by
            if engines.get(session) is None and session != DAEMON_SESSION
        )
        pins[namespace] = np.zeros_like(residency.tier.lease_pins)
    for lease in leases.all_leases():
        places = lease.all_places()
        pins[lease.namespace][places[places >= 0]] += 1
    found.extend(
        f"namespace {namespace}: lease pins and leases disagree"
        for namespace, expected in pins.items()
        if (namespaces[namespace].tier.lease_pins != expected).any()
    )
    return found


def _namespace_counts(residency: Residency, engines: EngineTable) -> NamespaceCounts:
    tier = residency.tier
    quarantined_count = sum(
        count for session, count in tier.reserved_by.items() if engines.is_quarantined(session)
    )
    return NamespaceCounts(
        namespace=residency.facts.namespace,
        epoch=residency.epoch,
        block_count=len(residency.index),
        slot_count=tier.allocator.slot_count + tier.allocator.leaving_count,
        free_count=tier.allocator.free_count,
        ready_count=tier.count_in(ReplicaState.READY),
        reserved_count=tier.count_in(ReplicaState.RESERVED),
        quarantined_count=quarantined_count,
        leased_count=tier.leased_count,
        held_count=tier.held_count(),
        slot_bytes=residency.facts.slot_bytes,
        shard_count=residency.facts.shard_count,
    )


def _session_counts(session: Session, namespaces: Namespaces, leases: LeaseTable) -> SessionCounts:
    return SessionCounts(
        session=session.session,
        engine=session.engine,
        role=session.role,
        state="live" if session.live else session.process.state.name.lower(),
        by_value=session.by_value,
        reserved_count=sum(
            one.tier.reserved_by.get(session.session, 0) for one in namespaces.values()
        ),
        lease_count=leases.count_of(session.session),
    )
