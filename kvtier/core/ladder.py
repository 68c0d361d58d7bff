"""The tiers below memory, the fastest first, each with its demotions; what is asked of all of them.

Each keeps copies by its own rule. A block that several have is read from the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.demotions import Demotions
from kvtier.core.index import NOBODY, PrefixIndex, Rows
from kvtier.core.lower_tier import LowerTier
from kvtier.core.residency import Residency
from kvtier.core.settings import LowerSettings
from kvtier.core.slices import Lost
from kvtier.core.slots import Slots
from kvtier.core.tenancy import Tenancy
from kvtier.types import NamespaceId, RemovedFor, TierName

Mask = npt.NDArray[np.bool_]
_CORRUPT = int(ev.TransferOutcome.CORRUPT)  # NumPy is slow with an enum.
# 0 for what is in memory, else which rung has the block, counted from 1.
Origins = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Rung:
    lower: LowerTier
    demotions: Demotions
    settings: LowerSettings


class Ladder:
    """Part of the block manager."""

    def __init__(
        self,
        namespaces: Mapping[NamespaceId, Residency],
        settings: Mapping[TierName, LowerSettings],
        tenancy: Tenancy,
    ) -> None:
        self._namespaces = namespaces
        self.rungs: dict[TierName, Rung] = {}
        for tier, its in settings.items():
            lower = LowerTier(tier, namespaces)
            self.rungs[tier] = Rung(lower, Demotions(namespaces, lower, its, tenancy), its)

    # ------------------------------------------------------------------------------- questions

    @property
    def tiers(self) -> tuple[TierName, ...]:
        return tuple(self.rungs)

    @property
    def is_writable(self) -> bool:
        return any(rung.lower.is_writable for rung in self.rungs.values())

    def opened(self) -> list[Rung]:
        return [rung for rung in self.rungs.values() if rung.lower.is_open]

    def origins(self, index: PrefixIndex, rows: Rows, absent: Mask) -> Origins:
        """Where each block would be read from: `absent` says which are not in memory."""
        found = np.zeros(len(rows), dtype=np.int8)
        if not np.count_nonzero(absent):
            return found
        for number, rung in enumerate(self.rungs.values(), start=1):
            if rung.lower.is_readable:
                here = absent & (found == 0) & (rung.lower.columns(index).slot[rows] != NOBODY)
                found[here] = number
        # Its tier has just become unreadable, and loses it slice by slice.
        if self.rungs:
            found[absent & (found == 0)] = len(self.rungs)
        return found

    def has_readable(self, index: PrefixIndex, row: int) -> bool:
        """Whether the block can be read from some tier."""
        return any(
            rung.lower.is_readable and int(rung.lower.columns(index).slot[row]) != NOBODY
            for rung in self.rungs.values()
        )

    def check_invariants(self) -> list[str]:
        return [
            one
            for rung in self.rungs.values()
            for one in (*rung.lower.check_invariants(), *rung.demotions.check_invariants())
        ]

    # ----------------------------------------------------------------------------------- blocks

    def note_namespace(self, residency: Residency) -> None:
        for rung in self.rungs.values():
            rung.lower.note_namespace(residency)

    def note_use(self, residency: Residency, rows: Rows) -> None:
        for rung in self.rungs.values():
            rung.demotions.note_use(residency, rows)

    def note_summed(self, residency: Residency, rows: Rows) -> None:
        for rung in self.rungs.values():
            rung.demotions.note_summed(residency, rows)

    def admit(self, residency: Residency, rows: Rows) -> None:
        for rung in self.rungs.values():
            rung.demotions.admit(residency, rows)

    def pump(self, now: float) -> list[ins.Instruction]:
        return [one for rung in self.rungs.values() for one in rung.demotions.pump(now)]

    def clear(self, fingerprint: bytes) -> None:
        for rung in self.rungs.values():
            rung.lower.clear(fingerprint)

    def forget(self, lost: Lost) -> list[ins.Instruction]:
        """What went there with blocks that are gone."""
        return [
            one
            for tier, slots in lost.lower_slots.items()
            for one in self.rungs[tier].lower.forget_slots(slots)
        ]

    def on_demoted(self, event: ev.Demoted, now: float) -> list[ins.Instruction]:
        corrupt = event.slots[event.outcomes == _CORRUPT]
        lost = self.lose_uncompared(self._namespaces[event.namespace], corrupt)
        return [*lost, *self.rungs[event.tier].demotions.on_demoted(event, now)]

    def lose_uncompared(self, residency: Residency, slots: Slots) -> list[ins.Instruction]:
        """What lies in these slots of memory is corrupt: so may be copies that nobody compares."""
        if not len(slots):
            return []
        rows = residency.tier.row[residency.tier.allocator.places_of(slots)]
        rows = rows[rows != NOBODY]
        found: list[ins.Instruction] = []
        for rung in self.opened():
            if not rung.settings.is_compared:
                below = rung.lower.columns(residency.index).slot[rows]
                lost = below[below != NOBODY].tolist()
                found.extend(rung.lower.lose(residency, lost, RemovedFor.CORRUPT))
        return found

    def forgets_something(self, now: float) -> bool:
        """Whether `forget_some` has something to do, as far as is known."""
        return any(rung.demotions.retiring.is_due(now) for rung in self.rungs.values())

    def forget_some(self, now: float) -> list[ins.Instruction] | None:
        """A slice of what tiers lose: all of it where one is gone, else the retiring segment; None
        when there is nothing to do now."""
        for rung in self.rungs.values():
            found = rung.lower.lose_some() or rung.demotions.retiring.step(now)
            if found is not None:
                return found
        return None
