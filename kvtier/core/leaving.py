"""How blocks leave memory: which may, and chains of them at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core.index import NOBODY, PrefixIndex
from kvtier.core.replica import READY
from kvtier.core.tiers import MemoryTier
from kvtier.policy.eviction import Evictable, EvictionPolicy


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
            row = parent_of(row)
            if row == NOBODY or children_of(row) != 1 or not is_in_memory(index, tier, row):
                break
            if tier.is_pinned(index.place.item(row)):
                break
            chain.append(row)
        return chain

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
