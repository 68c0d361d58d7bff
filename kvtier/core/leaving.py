"""How blocks leave memory: which may, and chains of them at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.core.index import NOBODY, PrefixIndex
from kvtier.core.replica import READY
from kvtier.core.tiers import MemoryTier
from kvtier.policy.eviction import Evictable, EvictionPolicy

# Fewer are sooner looked at one by one.
_RUN_MIN = 32


@dataclass(frozen=True, slots=True)
class Leaving:
    """Of one namespace; has no state of its own."""

    index: PrefixIndex
    tier: MemoryTier

    def may_evict(self, row: int) -> Evictable:
        index = self.index
        # A doomed row must not be taken out twice; it leaves the policy when it is swept.
        if not index.has_row(row) or index.memory_children.item(row):
            return _INNER
        if not is_in_memory(index, self.tier, row):
            return _INNER  # Announced while in memory; it will be announced again.
        return _HELD if self.tier.is_pinned(index.place.item(row)) else _YES

    def chain_of(self, row: int, count: int) -> Sequence[int]:
        """As `ChainOf` of policy/eviction.py."""
        chain = [row]
        index, tier = self.index, self.tier
        if index.sweep_pending:
            return chain  # What lies before it may be doomed.
        parent_of, children_of = index.parent.item, index.memory_children.item
        while len(chain) < count:
            before = parent_of(row)
            if before == row - 1 and count - len(chain) >= _RUN_MIN:
                run = self._run_before(row, count - len(chain))
                chain.extend(range(row - 1, row - 1 - run, -1))
                row -= run
                if run:
                    continue
            row = before
            if row == NOBODY or children_of(row) != 1 or not is_in_memory(index, tier, row):
                break
            if tier.is_pinned(index.place.item(row)):
                break
            chain.append(row)
        return chain

    def _run_before(self, row: int, count: int) -> int:
        """How many of the blocks before this one, `count` at most, may go with it and lie in rows
        that follow one another. Blocks that came together do, and are looked at together."""
        index, tier = self.index, self.tier
        first = max(0, row - count)
        places = index.place[first:row]
        good = index.parent[first + 1 : row + 1] == np.arange(first, row)
        good &= index.memory_children[first:row] == 1
        good &= tier.is_ready(places)
        good &= (tier.lease_pins.take(places) | tier.transfer_pins.take(places)) == 0
        bad = np.flatnonzero(~good)
        return row - first if not len(bad) else row - 1 - first - int(bad[-1])

    def leave(self, rows: list[int], policy: EvictionPolicy) -> int | None:
        """The READY replicas of a chain, its last block first, go; the caller ends them in the
        tier. Returns the row before the chain if that has no children in memory any more."""
        index = self.index
        parent = index.leave_memory(rows)
        policy.on_remove(rows)
        if not index.has_lower(rows) and index.are_only_children(rows):
            index.remove_all(rows)
            return parent
        for row in rows:
            if index.is_lower(row):
                continue
            if index.is_leaf(row):
                index.remove(row)
            else:
                index.doom(row)
        return parent


def is_in_memory(index: PrefixIndex, tier: MemoryTier, row: int) -> bool:
    place = index.place.item(row)
    return place != NOBODY and tier.state.item(place) == READY


# Python 3.11 looks for an enum's member by name.
_YES, _HELD, _INNER = Evictable.YES, Evictable.HELD, Evictable.INNER
