"""The slot allocator against a set of taken slot numbers for each slab set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.core.slots import SlotAllocator
from kvtier.errors import NotReserved, TierFull
from kvtier.types import SlabSetId
from tests.support.machines import machine_settings

SET_SLOTS = 5
picks = st.integers(0, 63)


class SlotAllocatorMachine(RuleBasedStateMachine):
    """Slab sets come and go; slots are known by number outside, by place inside."""

    @initialize()
    def start(self) -> None:
        self.allocator = SlotAllocator(SET_SLOTS)
        self.taken: dict[int, set[int]] = {}  # Set -> numbers of its taken slots.
        self.first: dict[int, int] = {}
        self.withdrawn: set[int] = set()
        self.next_set = 1
        self.next_slot = 3

    @rule(gap=st.integers(0, 7))
    def add_set(self, gap: int) -> None:
        if len(self.taken) < 4:
            self.allocator.add_set(SlabSetId(self.next_set), self.next_slot)
            self.taken[self.next_set] = set()
            self.first[self.next_set] = self.next_slot
            self.next_set += 1
            self.next_slot += SET_SLOTS + gap

    @rule(count=st.integers(0, 2 * SET_SLOTS), pick=picks)
    def take(self, count: int, pick: int) -> None:
        usable = (
            None if pick % 3 == 0 else {SlabSetId(one) for one in self.taken if pick >> one & 1}
        )
        mine = [one for one in self.taken if one not in self.withdrawn]
        mine = [one for one in mine if usable is None or one in usable]
        free_count = sum(SET_SLOTS - len(self.taken[one]) for one in mine)
        assert self.allocator.free_count_in(usable) == free_count
        if count > free_count:
            with pytest.raises(TierFull):
                self.allocator.take(count, usable)
            return
        slots = self.allocator.slots_of(self.allocator.take(count, usable)).tolist()
        assert len(set(slots)) == count
        for slot in slots:
            owner = self.set_of(slot)
            assert owner in mine, "a slot of a set that was not asked for"
            assert slot not in self.taken[owner], "a taken slot was given out again"
            self.taken[owner].add(slot)

    @rule(pick=picks, count=st.integers(1, 6))
    def release(self, pick: int, count: int) -> None:
        taken = sorted(slot for slots in self.taken.values() for slot in slots)
        start = pick % len(taken) if taken else 0
        freed = taken[start : start + count]
        self.allocator.release(self.allocator.places_of(np.array(freed, dtype=np.uint32)))
        for slot in freed:
            self.taken[self.set_of(slot)].remove(slot)

    @rule(pick=picks)
    def withdraw(self, pick: int) -> None:
        alive = [one for one in self.taken if one not in self.withdrawn]
        if alive:
            chosen = alive[pick % len(alive)]
            self.allocator.withdraw(SlabSetId(chosen))
            self.withdrawn.add(chosen)

    @rule()
    def remove_idle_sets(self) -> None:
        for one in sorted(self.withdrawn):
            assert self.allocator.is_idle(SlabSetId(one)) == (not self.taken[one])
            if not self.taken[one]:
                self.allocator.remove_set(SlabSetId(one))
                self.withdrawn.remove(one)
                del self.taken[one], self.first[one]

    @rule(slot=st.integers(0, 60))
    def ask_for_a_place(self, slot: int) -> None:
        known = any(first <= slot < first + SET_SLOTS for first in self.first.values())
        asked = np.array([slot], dtype=np.uint32)
        if known:
            assert self.allocator.slots_of(self.allocator.places_of(asked)).tolist() == [slot]
        else:
            with pytest.raises(NotReserved):
                self.allocator.places_of(asked)

    @invariant()
    def counts_agree(self) -> None:
        assert self.allocator.check_invariants() == []
        alive = [one for one in self.taken if one not in self.withdrawn]
        assert self.allocator.slot_count == SET_SLOTS * len(alive)
        assert self.allocator.free_count == sum(SET_SLOTS - len(self.taken[one]) for one in alive)
        assert self.allocator.taken_count == sum(map(len, self.taken.values()))

    def set_of(self, slot: int) -> int:
        return next(one for one, first in self.first.items() if first <= slot < first + SET_SLOTS)


TestSlotAllocator = SlotAllocatorMachine.TestCase
TestSlotAllocator.settings = machine_settings(examples=50, steps=40)
TestSlotAllocator.pytestmark = [pytest.mark.slow, pytest.mark.full_form]
