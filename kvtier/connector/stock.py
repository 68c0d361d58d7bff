"""Slots reserved ahead, so that planning an offload waits for nobody."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.connector.client_api import ReservationLike


@dataclass(frozen=True, slots=True, eq=False)
class Footing:
    """What slots were reserved under; compared by identity, void when any of it changes."""

    namespace: Any
    session: Any
    epoch: int


class SlotStock:
    """Invariant: a reserved slot is in the stock or given out, never both, and of one footing."""

    def __init__(self, *, stock_blocks: int, stock_blocks_max: int) -> None:
        self._stock_blocks = min(stock_blocks, stock_blocks_max)
        self._stock_blocks_max = stock_blocks_max
        self._footing: Footing | None = None
        self._slots: deque[int] = deque()
        self._given: set[int] = set()
        self._stock_count_max = stock_blocks_max  # The daemon's limit, told with each reservation.
        self._wanted = 0
        self._paused_until = float("-inf")
        self.is_asking = False

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def footing(self) -> Footing | None:
        return self._footing

    @property
    def given_count(self) -> int:
        return len(self._given)

    def add(self, namespace: Any, reservation: ReservationLike) -> tuple[Footing | None, list[int]]:
        """Take the slots in. Returns slots of another footing that were thrown away for them."""
        footing, old_slots = self._footing, []
        if (
            footing is None
            or footing.namespace is not namespace
            or footing.session != reservation.session
            or footing.epoch != reservation.epoch
        ):
            old_slots = self.discard()
            self._footing = Footing(namespace, reservation.session, reservation.epoch)
        slots = [int(slot) for slot in reservation.slots]
        assert self._given.isdisjoint(slots), "the daemon reserved a slot twice"
        self._slots.extend(slots)
        self._stock_count_max = reservation.stock_count_max
        self._wanted = 0
        return footing, old_slots

    def take(self, count: int) -> list[int]:
        """Up to `count` slots, given out until `end` or `give_back`."""
        slots = [self._slots.popleft() for _ in range(min(count, len(self._slots)))]
        self._given.update(slots)
        return slots

    def want(self, count: int) -> None:
        """Somebody is short of `count` slots: the next refill may be larger."""
        self._wanted = max(self._wanted, count)

    def give_back(self, footing: Footing, slots: Sequence[int]) -> None:
        """Slots that no worker was told of: they may be used again."""
        if footing is self._footing:
            self._given.difference_update(slots)
            self._slots.extendleft(reversed(slots))

    def end(self, footing: Footing, slots: Sequence[int]) -> None:
        """Committed or aborted: no longer ours. Those of another footing are forgotten already."""
        if footing is self._footing:
            assert self._given.issuperset(slots), "a slot ended that was not given out"
            self._given.difference_update(slots)

    def recall(self, count: int, *, pause_until: float) -> list[int]:
        """Up to `count` slots that nobody was given, to be aborted; no refill until then."""
        self._paused_until = max(self._paused_until, pause_until)
        return [self._slots.pop() for _ in range(min(count, len(self._slots)))]

    def discard(self) -> list[int]:
        """Throw the stock away; the caller aborts the slots if their session still lives."""
        slots = list(self._slots)
        self._slots.clear()
        self._given = set()
        self._footing = None
        return slots

    def pause(self, *, until: float) -> None:
        self._paused_until = max(self._paused_until, until)

    def refill_count(self, *, now: float) -> int:
        """Slots to ask for now: none above half the target, then up to it.

        The gap is hysteresis: one call brings many slots.
        """
        if self.is_asking or now < self._paused_until:
            return 0
        target = min(max(self._stock_blocks, self._wanted), self._stock_blocks_max)
        if len(self._slots) * 2 > target and self._wanted == 0:
            return 0
        held_count = len(self._slots) + len(self._given)
        # Holding nothing we ask for one all the same, to learn a limit that has grown.
        room = max(self._stock_count_max - held_count, 1 if held_count == 0 else 0)
        return max(0, min(target - len(self._slots), room))

    def check_invariants(self) -> list[str]:
        found = []
        if len(set(self._slots)) != len(self._slots):
            found.append("a slot is twice in the stock")
        if not self._given.isdisjoint(self._slots):
            found.append("a slot is in the stock and given out")
        if self._footing is None and (self._slots or self._given):
            found.append("slots without a footing")
        return found
