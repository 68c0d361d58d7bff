"""Who may write how much to a tier below memory: each tenant its guaranteed part, the rest for all;
pure.

Each minimum is a bucket of its own, which nobody else empties; what does not fit into it any more
goes to all. A maximum is a bucket too, of which everything that the tenant writes is taken.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.core.tenancy import TenantBudget
from kvtier.core.write_budget import WriteBudget


class WriteShares:
    """Told the time, in seconds."""

    def __init__(self, budgets: Mapping[str, TenantBudget], *, bytes_per_hour: float) -> None:
        def part(fraction: float) -> WriteBudget:
            return WriteBudget(bytes_per_hour=bytes_per_hour * fraction)

        self.bytes_per_hour = bytes_per_hour
        guaranteed = sum(one.minimum for one in budgets.values())
        self._common = part(max(0.0, 1.0 - guaranteed))
        self._own = {name: part(one.minimum) for name, one in budgets.items() if one.minimum}
        self._caps = {name: part(one.maximum) for name, one in budgets.items() if one.maximum < 1}

    @property
    def left_bytes(self) -> float:
        return self._common.left_bytes + sum(one.left_bytes for one in self._own.values())

    def fill(self, free_bytes: float) -> None:
        """The pool has so much room that nothing was ever written to."""
        self._common.fill(free_bytes)

    def tell(self, now: float) -> None:
        self._common.tell(now)
        for one in self._caps.values():
            one.tell(now)
        for one in self._own.values():
            self._common.add(one.tell(now))

    def may_write(self, tenant: str) -> bool:
        cap, own = self._caps.get(tenant), self._own.get(tenant)
        if cap is not None and not cap.may_write():
            return False
        return self._common.may_write() or (own is not None and own.may_write())

    def has_spare(self, tenant: str) -> bool:
        """Whether blocks may be written that nobody has used a second time yet."""
        cap, own = self._caps.get(tenant), self._own.get(tenant)
        if cap is not None and not cap.has_spare():
            return False
        return self._common.has_spare() or (own is not None and own.has_spare())

    def share(self, tenant: str) -> float:
        """Of an hour's bytes, how much the tenant has left; more than 1 while writing is free."""
        own, cap = self._own.get(tenant), self._caps.get(tenant)
        left = self._common.share if self._common.bytes_per_hour or own is None else 0.0
        if own is not None:
            left = max(left, own.share)
        return left if cap is None else min(left, cap.share)

    def take(self, tenant: str, length_bytes: int) -> None:
        """May end below 0 by one batch; that is paid back before the next."""
        if (cap := self._caps.get(tenant)) is not None:
            cap.take(length_bytes)
        own = self._own.get(tenant)
        if own is not None and own.may_write():
            own.take(length_bytes)
        else:
            self._common.take(length_bytes)
