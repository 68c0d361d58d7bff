"""Who has too many slabs, and who may have more: tenants first, then the namespaces of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvtier.core.residency import Residency
from kvtier.core.settings import ManagerConfig
from kvtier.core.slabs import SlabLedger
from kvtier.core.tenancy import Tenancy
from kvtier.types import NamespaceId

# Limits follow shares this late: leases ask for them a thousand times a second.
_TOLD_SECONDS = 0.1


class Balance:
    """Part of the block manager; reads the ledger, and remembers who was last at work."""

    def __init__(
        self,
        ledger: SlabLedger,
        namespaces: Mapping[NamespaceId, Residency],
        config: ManagerConfig,
    ) -> None:
        self._ledger = ledger
        self._namespaces = namespaces
        self._idle_seconds = config.idle_seconds
        self.tenancy = Tenancy(config.tenants, idle_seconds=config.idle_seconds)
        self._used_at: dict[NamespaceId, float] = {}
        self._told: tuple[float, dict[str, float]] | None = None  # Shares, and when.

    def note_use(self, namespace: NamespaceId, now: float) -> None:
        self._used_at[namespace] = now
        self.tenancy.note_use(self._tenant_of(namespace), now)

    # ------------------------------------------------------------------------------- questions

    def share_bytes(self, tenant: str, now: float) -> int:
        """Of memory, what the tenant may have now."""
        return int(self._share(tenant, now) * self._ledger.slab_bytes)

    def may_grow(self, residency: Residency) -> bool:
        """Whether one more set keeps the tenant within its maximum."""
        if self.tenancy.is_alone:
            return True
        facts = residency.facts
        maximum = self.tenancy.budget(facts.tenant).maximum * self._ledger.slab_count_max
        return self._held().get(facts.tenant, 0) + facts.shard_count <= maximum

    def is_owed(self, residency: Residency, now: float) -> bool:
        """Whether one more set keeps the tenant within its share, so that it will come."""
        if self.tenancy.is_alone:
            return True
        facts = residency.facts
        share = max(self._share(facts.tenant, now), facts.shard_count)
        return self._held().get(facts.tenant, 0) + facts.shard_count <= share

    def poorest_first(self, namespaces: Iterable[NamespaceId], now: float) -> list[NamespaceId]:
        """Tenants with least of what they may have, then namespaces with fewest sets."""
        held, wanting = self._held(), list(namespaces)
        parts = {
            tenant: held.get(tenant, 0) / max(1.0, self._share(tenant, now))
            for tenant in set(map(self._tenant_of, wanting))
        }
        return sorted(
            wanting,
            key=lambda one: (parts[self._tenant_of(one)], len(self._ledger.sets_of(one))),
        )

    def victim(self, residency: Residency, now: float) -> NamespaceId | None:
        """Which namespace gives a set up for this one, if this one has less than its share."""
        if len(self._namespaces) == 1:
            return None  # Nobody else is there. With one tenant no share has to be found.
        if self.tenancy.is_alone:
            return self._victim_within(residency, self._ledger.slab_count_max, now)
        held, tenant = self._held(), residency.facts.tenant
        shares = self.tenancy.shares(self._ledger.slab_count_max, held, now, wanting=tenant)
        needed_count = residency.facts.shard_count
        if held.get(tenant, 0) + needed_count <= max(shares[tenant], needed_count):
            rich = [
                (count - shares[other], other)
                for other, count in held.items()
                if other != tenant and count > shares[other]
            ]
            if rich:
                return self._richest_of(max(rich)[1], now)
        return self._victim_within(residency, int(shares[tenant]), now)

    # --------------------------------------------------------------------------------- helpers

    def _victim_within(
        self, residency: Residency, total_count: int, now: float
    ) -> NamespaceId | None:
        """Likewise among namespaces of one tenant, which may have so many slabs."""
        mine, needed_count = residency.facts.namespace, residency.facts.shard_count
        slabs = self._slab_counts(residency.facts.tenant)
        claims = {one for one in {*slabs, mine} if not self._is_idle(one, now)}
        fair_count = total_count // max(1, len(claims))
        if slabs.get(mine, 0) + needed_count > max(fair_count, needed_count):
            return None
        rich = {
            namespace: count
            for namespace, count in slabs.items()
            if namespace != mine and (namespace not in claims or count > fair_count)
        }
        return self._first_to_give(rich, now)

    def _richest_of(self, tenant: str, now: float) -> NamespaceId | None:
        return self._first_to_give(self._slab_counts(tenant), now)

    def _first_to_give(self, slabs: Mapping[NamespaceId, int], now: float) -> NamespaceId | None:
        """An idle one before all others, then who has most."""
        return max(slabs, key=lambda one: (self._is_idle(one, now), slabs[one], one), default=None)

    def _is_idle(self, namespace: NamespaceId, now: float) -> bool:
        return now - self._used_at.get(namespace, 0.0) > self._idle_seconds

    def _tenant_of(self, namespace: NamespaceId) -> str:
        return self._namespaces[namespace].facts.tenant

    def _slab_counts(self, tenant: str) -> dict[NamespaceId, int]:
        counts: dict[NamespaceId, int] = {}
        for one in self._ledger.sets.values():
            if self._tenant_of(one.namespace) == tenant:
                counts[one.namespace] = counts.get(one.namespace, 0) + len(one.slabs)
        return counts

    def _held(self) -> dict[str, int]:
        """Slabs by tenant."""
        counts: dict[str, int] = {}
        for one in self._ledger.sets.values():
            tenant = self._tenant_of(one.namespace)
            counts[tenant] = counts.get(tenant, 0) + len(one.slabs)
        return counts

    def _share(self, tenant: str, now: float) -> float:
        """Slabs that the tenant may have now."""
        total = self._ledger.slab_count_max
        if self.tenancy.is_alone:
            return total
        if self._told is None or now - self._told[0] > _TOLD_SECONDS or tenant not in self._told[1]:
            shares = self.tenancy.shares(total, self._held(), now, wanting=tenant)
            self._told = now, shares
        return self._told[1][tenant]
