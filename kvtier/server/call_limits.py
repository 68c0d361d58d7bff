"""How many calls a tenant may have under way, and begin in a second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvtier.errors import LimitExceeded


class CallLimits:
    """Belongs to the event loop. Told the time, in seconds."""

    def __init__(self, *, calls_max: int, rates: Mapping[str, int] | None = None) -> None:
        """`rates`: calls a second, by tenant; those that are not named have no limit."""
        self.calls_max = calls_max
        self._rates = rates or {}
        self._active: dict[str, int] = {}
        self._left = {tenant: float(rate) for tenant, rate in self._rates.items()}
        self._told_at: dict[str, float] = {}

    @property
    def active_count(self) -> int:
        """Of the tenant that has most under way."""
        return max(self._active.values(), default=0)

    @contextmanager
    def under_way(self, tenant: str) -> Iterator[None]:
        """Counts a call, whether it is admitted then or not."""
        self._active[tenant] = self._active.get(tenant, 0) + 1
        try:
            yield
        finally:
            self._active[tenant] -= 1

    def check_room(self, tenant: str) -> None:
        """Whether there is room for the call that was counted last; raises LimitExceeded."""
        if self._active[tenant] > self.calls_max:
            raise LimitExceeded(f"{self.calls_max} calls are under way (grpc.calls_max)")

    def may_begin(self, tenant: str, now: float, *, gives_back: bool = False) -> bool:
        """Whether the tenant's rate allows one more call; it is counted then.

        One that gives back what another call took may be a second ahead of the rate: were it
        refused, slots and leases would stay taken, of others' share too.
        """
        rate = self._rates.get(tenant)
        if rate is None:
            return True
        earned = (now - self._told_at.get(tenant, now)) * rate
        self._told_at[tenant] = now
        left = min(float(rate), self._left[tenant] + earned)
        is_allowed = left >= (1.0 - rate if gives_back else 1.0)
        self._left[tenant] = left - is_allowed
        return is_allowed

    def refusal(self, tenant: str) -> LimitExceeded:
        """What a client is told whose call may not begin."""
        return LimitExceeded(
            f"more than {self._rates[tenant]} calls a second (tenant.{tenant}.calls_per_second): "
            "ask less often, or of more blocks at once"
        )
