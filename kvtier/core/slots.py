"""The slots of one namespace in a memory tier: which are free, and in which slab set they lie.

Slot *numbers* belong to the pool, are handed to a slab set once and never used again. Inside the
core a slot is known by its *place*: `ordinal * set_slot_count + offset`, a small number that may be
used again after its slab set is gone, so that the columns of a namespace stay short.

Invariant: every slot of a slab set is free or taken, never both; none is lost.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.core.columns import grow
from kvtier.core.replica import Places
from kvtier.errors import NotReserved, TierFull
from kvtier.types import SlabSetId

Slots = npt.NDArray[np.uint32]


@dataclass(slots=True)
class _FreeStack:
    """Free places of one slab set; the last `count` of `places` that are taken first."""

    slab_set: SlabSetId
    ordinal: int
    slot_first: int
    places: Places
    count: int
    withdrawn: bool = False


class SlotAllocator:
    """Takes and releases slots of one namespace, in slab sets of `set_slot_count` slots each."""

    def __init__(self, set_slot_count: int) -> None:
        assert set_slot_count > 0, "a slab set holds at least one slot"
        self.set_slot_count = set_slot_count
        self.slot_count = 0  # Of all sets that are not withdrawn.
        self._stacks: dict[SlabSetId, _FreeStack] = {}
        self._stack_at: dict[int, _FreeStack] = {}  # By ordinal.
        self._taken = np.zeros(0, dtype=np.bool_)
        self._spare_ordinals: list[int] = []
        self._firsts = np.zeros(0, dtype=np.int64)  # Ascending slot_first of the sets …
        self._place_firsts = np.zeros(0, dtype=np.int64)  # … and their first places.
        # By ordinal: how far a slot's number is ahead of its place.
        self._slots_ahead = np.zeros(0, dtype=np.int64)

    @property
    def place_count(self) -> int:
        """Length that columns indexed by place need."""
        return len(self._taken)

    @property
    def free_count(self) -> int:
        return sum(stack.count for stack in self._stacks.values() if not stack.withdrawn)

    @property
    def leaving_count(self) -> int:
        """Slots of withdrawn sets that are taken still."""
        return sum(
            self.set_slot_count - stack.count for stack in self._stacks.values() if stack.withdrawn
        )

    @property
    def taken_count(self) -> int:
        return int(self._taken.sum())

    @property
    def slab_sets(self) -> list[SlabSetId]:
        return list(self._stacks)

    def add_set(self, slab_set: SlabSetId, slot_first: int) -> None:
        """All slots of a new set are free."""
        assert slab_set not in self._stacks, f"slab set {slab_set} added twice"
        if self._spare_ordinals:
            ordinal = self._spare_ordinals.pop()
        else:
            ordinal = len(self._taken) // self.set_slot_count
            grow(self._taken, len(self._taken) + self.set_slot_count, False)
        start = ordinal * self.set_slot_count
        # Descending, so that slots are taken in ascending order: neighbours in the chain are
        # neighbours in the slab, and copies of a run can be merged.
        places = np.arange(start + self.set_slot_count - 1, start - 1, -1, dtype=np.int32)
        stack = _FreeStack(slab_set, ordinal, slot_first, places, len(places))
        self._stacks[slab_set] = self._stack_at[ordinal] = stack
        self.slot_count += self.set_slot_count
        self._rebuild_firsts()

    def free_count_in(self, usable: Collection[SlabSetId] | None) -> int:
        """Free slots of these sets; of all sets when `usable` is None."""
        return sum(
            stack.count
            for stack in self._stacks.values()
            if not stack.withdrawn and (usable is None or stack.slab_set in usable)
        )

    def take(
        self,
        count: int,
        usable: Collection[SlabSetId] | None = None,
        near: Collection[SlabSetId] = (),
    ) -> Places:
        """Take `count` slots of these sets, of those `near` first, or none: raises TierFull and
        changes nothing."""
        stacks = self._usable_stacks(usable)
        if near:
            stacks.sort(key=lambda stack: stack.slab_set not in near)
        free_count = sum(stack.count for stack in stacks)
        if count > free_count:
            raise TierFull(f"want {count} slots, {free_count} free")
        parts: list[Places] = []
        for stack in stacks:
            share = min(count, stack.count)
            if share:
                parts.append(stack.places[stack.count - share : stack.count][::-1].copy())
                stack.count -= share
                count -= share
        places = _joined(parts)
        assert not np.count_nonzero(self._taken.take(places)), "a taken slot was on the free stack"
        self._taken[places] = True
        return places

    def take_set(self, slab_set: SlabSetId) -> Places:
        """Take all slots of a set, which are all free."""
        stack = self._stacks[slab_set]
        assert stack.count == self.set_slot_count, "a set was taken whole that is in use"
        stack.count = 0
        places = self.places_of_set(slab_set)
        self._taken[places] = True
        return places

    def take_places(self, places: Places) -> None:
        """Take these slots, which are all free."""
        assert not self._taken[places].any(), "a slot was taken twice"
        self._taken[places] = True
        ordinals = places // self.set_slot_count
        for ordinal in np.unique(ordinals).tolist():
            stack = self._stack_at[ordinal]
            free = stack.places[: stack.count]
            left = free[~self._taken[free]]
            stack.places[: len(left)] = left
            stack.count = len(left)

    def is_in_set(self) -> npt.NDArray[np.bool_]:
        """Of all places: which belong to a set now."""
        count = len(self._taken) // self.set_slot_count
        found = np.zeros((count, self.set_slot_count), dtype=np.bool_)
        found[list(self._stack_at)] = True
        return found.reshape(-1)

    def release(self, places: Places) -> None:
        """Free these slots; each must be taken."""
        if not len(places):
            return
        taken = np.count_nonzero(self._taken.take(places))
        assert taken == len(places), "a slot was released that is not taken"
        self._taken[places] = False
        ordinals = places // self.set_slot_count
        named = set(ordinals.tolist())
        for ordinal in named:  # In whichever order: each has a stack of its own.
            stack = self._stack_at[ordinal]
            share = places if len(named) == 1 else places[ordinals == ordinal]
            stack.places[stack.count : stack.count + len(share)] = share[::-1]
            stack.count += len(share)

    def is_taken(self, places: Places) -> npt.NDArray[np.bool_]:
        return self._taken[places]

    def withdraw(self, slab_set: SlabSetId) -> None:
        """Give no more slots of this set out."""
        stack = self._stacks[slab_set]
        assert not stack.withdrawn, f"slab set {slab_set} withdrawn twice"
        stack.withdrawn = True
        self.slot_count -= self.set_slot_count

    def is_withdrawn(self, slab_set: SlabSetId) -> bool:
        return self._stacks[slab_set].withdrawn

    def is_idle(self, slab_set: SlabSetId) -> bool:
        """Whether no slot of the set is taken."""
        return self._stacks[slab_set].count == self.set_slot_count

    def remove_set(self, slab_set: SlabSetId) -> None:
        """Forget a withdrawn set none of whose slots is taken."""
        stack = self._stacks[slab_set]
        assert stack.withdrawn, "a set was removed that is not withdrawn"
        assert stack.count == self.set_slot_count, "a set was removed while slots are taken"
        del self._stacks[slab_set]
        del self._stack_at[stack.ordinal]
        self._spare_ordinals.append(stack.ordinal)
        self._rebuild_firsts()

    def places_of_set(self, slab_set: SlabSetId) -> Places:
        start = self._stacks[slab_set].ordinal * self.set_slot_count
        return np.arange(start, start + self.set_slot_count, dtype=np.int32)

    def ordinals_of(self, slab_sets: Collection[SlabSetId]) -> list[int]:
        """Ordinals of these sets: place // set_slot_count."""
        return [self._stacks[one].ordinal for one in slab_sets if one in self._stacks]

    def places_of(self, slots: Slots) -> Places:
        """Places of slot numbers; raises NotReserved for a number that no set has."""
        if not len(slots):
            return np.zeros(0, dtype=np.int32)
        wide = slots.astype(np.int64)
        # A number below all sets is compared with the last one, so its offset is negative.
        where = self._firsts.searchsorted(wide, side="right") - 1
        offsets = wide - self._firsts.take(where) if len(self._firsts) else np.full_like(wide, -1)
        known = (offsets >= 0) & (offsets < self.set_slot_count)
        if np.count_nonzero(known) != len(known):
            slot = int(slots[~known][0])
            raise NotReserved(f"slot {slot} is not a slot of this namespace")
        return (self._place_firsts.take(where) + offsets).astype(np.int32)

    def slots_of(self, places: Places) -> Slots:
        """Slot numbers of places, the inverse of `places_of`."""
        return (places + self._slots_ahead.take(places // self.set_slot_count)).astype(np.uint32)

    def check_invariants(self) -> list[str]:
        found = []
        for stack in self._stacks.values():
            free = stack.places[: stack.count]
            mine = self.places_of_set(stack.slab_set)
            if len(np.unique(free)) != stack.count:
                found.append(f"slab set {stack.slab_set}: a slot is free twice")
            if self._taken[free].any():
                found.append(f"slab set {stack.slab_set}: a free slot is taken")
            if stack.count + int(self._taken[mine].sum()) != self.set_slot_count:
                found.append(f"slab set {stack.slab_set}: slots are lost")
        return found

    def _usable_stacks(self, usable: Collection[SlabSetId] | None) -> list[_FreeStack]:
        return [
            stack
            for stack in self._stacks.values()
            if not stack.withdrawn and (usable is None or stack.slab_set in usable)
        ]

    def _rebuild_firsts(self) -> None:
        stacks = sorted(self._stacks.values(), key=lambda stack: stack.slot_first)
        self._firsts = np.array([stack.slot_first for stack in stacks], dtype=np.int64)
        ordinals = np.array([stack.ordinal for stack in stacks], dtype=np.int64)
        self._place_firsts = ordinals * self.set_slot_count
        self._slots_ahead = np.zeros(len(self._taken) // self.set_slot_count, dtype=np.int64)
        self._slots_ahead[ordinals] = self._firsts - self._place_firsts


def _joined(parts: list[Places]) -> Places:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
