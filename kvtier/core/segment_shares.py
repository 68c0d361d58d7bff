"""Whose segments of a pool below memory are given up, and who may bind one more; pure.

A tenant that has its share gives up its own oldest segment for a new one; one that has less takes
the oldest of those who have more. So what a tenant is guaranteed nobody else's writing reaches.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.core.lower_tier import LowerTier
from kvtier.core.tenancy import Tenancy
from kvtier.layout import SegmentHeader

_NOBODY = "\0"  # Segments of namespaces that no tenant has.


class SegmentShares:
    """Part of the block manager; has no state of its own."""

    def __init__(self, lower: LowerTier, tenancy: Tenancy) -> None:
        self._lower = lower
        self._tenancy = tenancy

    def may_bind(self, tenant: str) -> bool:
        """Whether one more segment keeps the tenant within its maximum."""
        maximum = self._tenancy.budget(tenant).maximum
        if maximum >= 1.0:
            return True
        limit_count = max(1.0, maximum * self._lower.book.segment_count)
        return self._held().get(tenant, 0) + 1 <= limit_count

    def to_retire(self, tenant: str, now: float) -> Callable[[SegmentHeader], bool]:
        """Which segments may be given up for this tenant."""
        if self._tenancy.is_alone:
            return _whichever
        held = self._held()
        total = self._lower.book.segment_count
        shares = self._tenancy.shares(total, held, now, wanting=tenant)
        shares[_NOBODY] = 0.0
        givers = {other for other, count in held.items() if count > max(1.0, shares[other])}
        if held.get(tenant, 0) + 1 > max(1.0, shares[tenant]) or not self.may_bind(tenant):
            givers = {tenant}
        elif not givers:
            return _whichever
        return lambda life: self._owner(life) in givers

    def _held(self) -> dict[str, int]:
        """Segments by tenant."""
        counts: dict[str, int] = {}
        for life in self._lower.book.lives():
            owner = self._owner(life)
            counts[owner] = counts.get(owner, 0) + 1
        return counts

    def _owner(self, life: SegmentHeader) -> str:
        found = self._lower.tenant_of(life.fingerprint)
        return _NOBODY if found is None else found


def _whichever(life: SegmentHeader) -> bool:
    return True
