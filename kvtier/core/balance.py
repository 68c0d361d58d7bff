"""Who has too many slabs, and who may have more: tenants first, then the namespaces of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvtier.core.residency import Residency
from kvtier.core.settings import ManagerConfig
from kvtier.core.slabs import SlabLedger, SlabSet
from kvtier.core.tenancy import Tenancy
from kvtier.types import NamespaceId

# Limits follow shares this late: leases ask for them a thousand times a second.
_TOLD_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class _SlabCounts:
    """By namespace."""

    kept: dict[NamespaceId, int]  # Without those that are being taken back, and may still come.
    takeable: dict[NamespaceId, int]  # Of sets that are not withdrawn.
    promised: dict[NamespaceId, int]  # Are being taken back for this namespace.


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
        self._patience_seconds = config.growth_wait_seconds
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
        """Tenants that one more set keeps within their share, then those with least of what they
        may have, then namespaces with fewest sets."""
        held, wanting = self._held(), list(namespaces)
        shares = {one: self._share(one, now) for one in set(map(self._tenant_of, wanting))}

        def rank(namespace: NamespaceId) -> tuple[bool, float, int]:
            facts = self._namespaces[namespace].facts
            count, share = held.get(facts.tenant, 0), shares[facts.tenant]
            is_beyond = count + facts.shard_count > share
            return is_beyond, count / max(1.0, share), len(self._ledger.sets_of(namespace))

        return sorted(wanting, key=rank)

    def promised_count(self, namespace: NamespaceId, now: float) -> int:
        """Slabs that are being taken back for this namespace."""
        return self._counts(now).promised.get(namespace, 0)

    def victim(self, residency: Residency, now: float) -> SlabSet | None:
        """Which set somebody gives up for this namespace, if it has less than its share.

        What is being taken back already counts for whom it is taken back. What does not come back
        whoever holds it pays for: as much is taken of the rest that it has.
        """
        if len(self._namespaces) == 1:
            return None  # Nobody else is there.
        mine, needed_count = residency.facts.namespace, residency.facts.shard_count
        tenant, counts = residency.facts.tenant, self._counts(now)
        held, kept = self._held(), self._by_tenant(counts.kept)
        shares = self.tenancy.shares(self._ledger.slab_count_max, held, now, wanting=tenant)
        promised = {one: count for one, count in counts.promised.items() if one != mine}
        mine_count = kept.get(tenant, 0) + self._by_tenant(promised).get(tenant, 0)
        if mine_count + needed_count <= max(shares[tenant], needed_count):
            takeable = self._by_tenant(counts.takeable)
            rich = [
                (count - shares[other], other)
                for other, count in kept.items()
                if other != tenant and count > shares[other] and other in takeable
            ]
            if rich:
                return self._first_to_give(self._of_tenant(counts.takeable, max(rich)[1]), now)
        return self._victim_within(residency, int(shares[tenant]), counts, now)

    # --------------------------------------------------------------------------------- helpers

    def _victim_within(
        self, residency: Residency, total_count: int, counts: _SlabCounts, now: float
    ) -> SlabSet | None:
        """Likewise among namespaces of one tenant, which may have so many slabs."""
        mine, tenant = residency.facts.namespace, residency.facts.tenant
        needed_count, kept = residency.facts.shard_count, self._of_tenant(counts.kept, tenant)
        claims = {one for one in {*kept, mine} if not self._is_idle(one, now)}
        fair_count = total_count // max(1, len(claims))
        if kept.get(mine, 0) + needed_count > max(fair_count, needed_count):
            return None
        rich = {
            namespace: kept[namespace]
            for namespace in self._of_tenant(counts.takeable, tenant)
            if namespace != mine and (namespace not in claims or kept[namespace] > fair_count)
        }
        return self._first_to_give(rich, now)

    def _first_to_give(self, slabs: Mapping[NamespaceId, int], now: float) -> SlabSet | None:
        """The last set of an idle namespace, else of the one that has most of these slabs."""
        victim = max(
            slabs, key=lambda one: (self._is_idle(one, now), slabs[one], one), default=None
        )
        if victim is None:
            return None
        return [one for one in self._ledger.sets_of(victim) if not one.withdrawn][-1]

    def _is_idle(self, namespace: NamespaceId, now: float) -> bool:
        return now - self._used_at.get(namespace, 0.0) > self._idle_seconds

    def _tenant_of(self, namespace: NamespaceId) -> str:
        return self._namespaces[namespace].facts.tenant

    def _counts(self, now: float) -> _SlabCounts:
        takeable: dict[NamespaceId, int] = {}
        leaving = []
        for one in self._ledger.sets.values():
            if one.withdrawn:
                leaving.append(one)
            else:
                takeable[one.namespace] = takeable.get(one.namespace, 0) + len(one.slabs)
        found = _SlabCounts(dict(takeable), takeable, {})
        for one in leaving:
            count, promised_to = len(one.slabs), one.promised_to
            if promised_to is None or now - one.withdrawn_at > self._patience_seconds:
                found.kept[one.namespace] = found.kept.get(one.namespace, 0) + count
            else:
                found.promised[promised_to] = found.promised.get(promised_to, 0) + count
        return found

    def _held(self) -> dict[str, int]:
        """Slabs by tenant."""
        counts: dict[str, int] = {}
        for one in self._ledger.sets.values():
            tenant = self._tenant_of(one.namespace)
            counts[tenant] = counts.get(tenant, 0) + len(one.slabs)
        return counts

    def _by_tenant(self, slabs: Mapping[NamespaceId, int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for namespace, count in slabs.items():
            tenant = self._tenant_of(namespace)
            found[tenant] = found.get(tenant, 0) + count
        return found

    def _of_tenant(self, slabs: Mapping[NamespaceId, int], tenant: str) -> dict[NamespaceId, int]:
        return {one: count for one, count in slabs.items() if self._tenant_of(one) == tenant}

    def _share(self, tenant: str, now: float) -> float:
        """Slabs that the tenant may have now."""
        total = self._ledger.slab_count_max
        if self.tenancy.is_alone:
            return total
        if self._told is None or now - self._told[0] > _TOLD_SECONDS or tenant not in self._told[1]:
            shares = self.tenancy.shares(total, self._held(), now, wanting=tenant)
            self._told = now, shares
        return self._told[1][tenant]
