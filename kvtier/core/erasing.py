"""Erasing: which bytes of a namespace that was cleared may be overwritten now, and which must wait.

A block that is gone leaves its bytes where they were until something else is written there. To
erase them is the shell's part; here it is decided what of that nobody may still read or write, and
that is held meanwhile. In memory those are the namespace's own slots: a slab that it gave up is
punched before it is used again. Below memory segments change hands as they are, so all that no
block lies in may be its remains, whoever fills the segment now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.columns import grow
from kvtier.core.engines import DAEMON_SESSION
from kvtier.core.erasing_events import (
    EraseBegun,
    EraseEnded,
    HoldRemains,
    HoldSlots,
    RemainsErased,
    SlotsErased,
)
from kvtier.core.index import NOBODY
from kvtier.core.ladder import Ladder
from kvtier.core.residency import Residency
from kvtier.types import NamespaceId, SessionId

Mask = npt.NDArray[np.bool_]
Handler = Callable[[Any, float], list[ins.Instruction]]


class Erasing:
    """Part of the block manager. Invariant: a slot that is held has a transfer pin for that."""

    def __init__(self, namespaces: Mapping[NamespaceId, Residency], ladder: Ladder) -> None:
        self._namespaces = namespaces
        self._ladder = ladder
        self._erased: dict[NamespaceId, Mask] = {}  # By place: held or overwritten since it began.
        self._fingerprints: set[bytes] = set()

    def handlers(self) -> dict[type, Handler]:
        return {
            EraseBegun: self._on_begun,
            HoldSlots: self._on_hold_slots,
            SlotsErased: self._on_slots_erased,
            HoldRemains: self._on_hold_remains,
            RemainsErased: self._on_remains_erased,
            EraseEnded: self._on_ended,
        }

    def _on_begun(self, event: EraseBegun, now: float) -> list[ins.Instruction]:
        self._fingerprints.add(event.fingerprint)
        self._ladder.clear(event.fingerprint)
        if event.namespace is None:
            return []
        residency = self._namespaces[event.namespace]
        residency.is_erasing = True
        self._erased[event.namespace] = np.zeros(0, dtype=np.bool_)
        owners, counts = np.unique(residency.tier.owner, return_counts=True)
        return [
            *(
                ins.RecallSlots(SessionId(owner), event.namespace, count)
                for owner, count in zip(owners.tolist(), counts.tolist(), strict=True)
                if owner not in (NOBODY, DAEMON_SESSION)
            ),
            ins.Continue(ev.SweepVoid()),
        ]

    def _on_hold_slots(self, event: HoldSlots, now: float) -> list[ins.Instruction]:
        tier = self._namespaces[event.namespace].tier
        allocator, erased = tier.allocator, self._erased[event.namespace]
        grow(erased, allocator.place_count, False)
        places = np.flatnonzero(allocator.is_in_set() & ~erased).astype(np.int32)
        is_taken = allocator.is_taken(places)
        free, waiting = places[~is_taken], places[is_taken]
        held = free[: event.count]
        allocator.take_places(held)
        tier.pin_for_transfer(held)
        erased[held] = True
        return [
            ins.SlotsHeld(
                event.namespace,
                tier.slots_of(held),
                left_count=len(free) - len(held),
                reserved_count=int((tier.owner[waiting] != NOBODY).sum()),
                leased_count=int((tier.lease_pins[waiting] > 0).sum()),
                waiting_count=len(waiting),
            )
        ]

    def _on_slots_erased(self, event: SlotsErased, now: float) -> list[ins.Instruction]:
        tier = self._namespaces[event.namespace].tier
        tier.unpin_transfer(tier.allocator.places_of(event.slots))
        return [ins.Continue(ev.SweepVoid())]  # Its set may have been withdrawn meanwhile.

    def _on_hold_remains(self, event: HoldRemains, now: float) -> list[ins.Instruction]:
        lower = self._ladder.rungs[event.tier].lower
        remains = lower.book.hold_remains(event.segment, self._fingerprints)
        if remains is None:
            return [ins.RemainsHeld(event.tier, event.segment, is_waiting=True)]
        if remains.life is None:
            lower.forget_segments([event.segment])
        return [
            ins.RemainsHeld(
                event.tier,
                event.segment,
                ranges=remains.ranges,
                void_rows=remains.void_rows,
                is_whole=remains.life is None,
            )
        ]

    def _on_remains_erased(self, event: RemainsErased, now: float) -> list[ins.Instruction]:
        self._ladder.rungs[event.tier].lower.book.release_remains(event.segment)
        return [ins.Continue(ev.SweepVoid())]  # Somebody may wait for the segment.

    def _on_ended(self, event: EraseEnded, now: float) -> list[ins.Instruction]:
        self._fingerprints.discard(event.fingerprint)
        if event.namespace is not None:
            self._erased.pop(event.namespace, None)
            self._namespaces[event.namespace].is_erasing = False
        return []
