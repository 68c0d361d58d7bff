"""What each tenant may have of what they share: minimum, maximum, and by weight in between; pure.

Shares are fractions of a whole, the same ones of memory, of the pool below it and of what may be
written there: a tenant has one budget. What a tenant does not want others may have, down to its
minimum of what it holds; when it wants it again it is taken from those who have more than theirs.

The division is weighted max-min fairness with floors and ceilings (progressive filling, as in
Bertsekas and Gallager, Data Networks, 6.5.2). The order of service is start-time fair queueing
(Goyal, Vin and Cheng, SIGCOMM 1996), without its bound on the length of one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_STEPS = 60  # Of bisection: far below a byte of a petabyte.


@dataclass(frozen=True, slots=True)
class TenantBudget:
    """Fractions of the whole; by default as if there were nobody else to be protected."""

    minimum: float = 0.0
    maximum: float = 1.0
    weight: float = 1.0
    priority: int = 1  # Whose blocks are promoted first: the smaller number.


NO_BUDGET = TenantBudget()


def divide(total: float, wants: Mapping[str, TenantBudget]) -> dict[str, float]:
    """What each of these may have of `total`, if all of them want as much as they can get.

    Nobody gets less than its minimum nor more than its maximum; in between all are filled to the
    same level by weight. Minima beyond the whole are cut alike.
    """
    floors = {name: total * one.minimum for name, one in wants.items()}
    excess = sum(floors.values()) / total if total > 0 else 0.0
    if excess > 1.0:
        return {name: floor / excess for name, floor in floors.items()}
    low, high = 0.0, total / min((one.weight for one in wants.values()), default=1.0)
    for _ in range(_STEPS):
        level = (low + high) / 2
        filled = _fill(level, total, wants)
        low, high = (level, high) if sum(filled.values()) <= total else (low, level)
    return _fill(low, total, wants)


def _fill(level: float, total: float, wants: Mapping[str, TenantBudget]) -> dict[str, float]:
    return {
        name: max(total * one.minimum, min(total * one.maximum, level * one.weight))
        for name, one in wants.items()
    }


class Tenancy:
    """Who is there, when each was last at work, and what each may have. Told the time, in
    seconds."""

    def __init__(self, budgets: Mapping[str, TenantBudget], *, idle_seconds: float) -> None:
        self._budgets = budgets
        self._idle_seconds = idle_seconds
        self._used_at: dict[str, float] = {}

    @property
    def is_alone(self) -> bool:
        """Whether there is one tenant at most, so that nothing is to be divided."""
        return len(self._used_at) <= 1 and not self._budgets

    @property
    def budgets(self) -> Mapping[str, TenantBudget]:
        """Of those that have one."""
        return self._budgets

    def budget(self, tenant: str) -> TenantBudget:
        return self._budgets.get(tenant, NO_BUDGET)

    def note_use(self, tenant: str, now: float) -> None:
        self._used_at[tenant] = now

    def shares(
        self, total: float, held: Mapping[str, float], now: float, *, wanting: str
    ) -> dict[str, float]:
        """What each tenant may have of `total`: of those at work their part, of the others what
        they hold, up to their minimum. `wanting` counts as at work."""
        active = {
            tenant: self.budget(tenant)
            for tenant in sorted({*held, *self._used_at, wanting})  # Sums are of one order.
            if tenant == wanting or now - self._used_at.get(tenant, 0.0) <= self._idle_seconds
        }
        kept = {
            tenant: min(count, total * self.budget(tenant).minimum)
            for tenant, count in held.items()
            if tenant not in active
        }
        left = max(0.0, total - sum(kept.values()))
        mine = {
            tenant: TenantBudget(
                min(1.0, one.minimum * total / left) if left else 0.0,
                min(1.0, one.maximum * total / left) if left else 1.0,
                one.weight,
            )
            for tenant, one in active.items()
        }
        return kept | {name: round(one, 6) for name, one in divide(left, mine).items()}


class Turns:
    """Whose turn it is when several wait for the same thing: it goes round by weight.

    A tenant that comes back begins where the others are, so it is owed nothing for its absence.
    """

    def __init__(self, tenancy: Tenancy) -> None:
        self._tenancy = tenancy
        self._served: dict[str, float] = {}  # What each has had, by its weight.
        self._now = 0.0  # Of whoever was served last, when its service began.

    def order(self, waiting: Iterable[str]) -> list[str]:
        """These tenants, who has had least first."""
        names = list(waiting)
        if len(names) < 2:
            return names
        return sorted(names, key=lambda name: (self.level(name), name))

    def level(self, tenant: str) -> float:
        return max(self._served.get(tenant, 0.0), self._now)

    def charge(self, tenant: str, cost: float) -> None:
        """It has been served so much."""
        self._now = begun = self.level(tenant)
        self._served[tenant] = begun + cost / self._tenancy.budget(tenant).weight
