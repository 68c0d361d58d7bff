"""The slot allocator: numbers outside, places inside. Random stories are in tests/model."""

from __future__ import annotations

import pytest

from kvtier.core.slots import SlotAllocator
from kvtier.errors import NotReserved, TierFull
from kvtier.types import SlabSetId
from tests.support.world import slots_of

FIRST, SECOND = SlabSetId(1), SlabSetId(2)


@pytest.fixture
def allocator() -> SlotAllocator:
    allocator = SlotAllocator(4)
    allocator.add_set(FIRST, 100)
    allocator.add_set(SECOND, 200)
    return allocator


def test_neighbours_are_taken_in_order(allocator: SlotAllocator) -> None:
    assert allocator.slots_of(allocator.take(6)).tolist() == [100, 101, 102, 103, 200, 201]


def test_a_take_that_cannot_be_served_changes_nothing(allocator: SlotAllocator) -> None:
    with pytest.raises(TierFull):
        allocator.take(5, [FIRST])
    assert allocator.free_count == 8
    assert allocator.check_invariants() == []


def test_a_slot_is_released_once(allocator: SlotAllocator) -> None:
    places = allocator.take(1)
    allocator.release(places)
    with pytest.raises(AssertionError):
        allocator.release(places)


def test_released_slots_are_taken_again_in_order(allocator: SlotAllocator) -> None:
    places = allocator.take(8)
    allocator.release(places[1:3])
    assert allocator.slots_of(allocator.take(2)).tolist() == [101, 102]


@pytest.mark.parametrize("slot", [0, 99, 104, 199, 204, 4_294_967_295])
def test_a_number_that_no_set_has_is_refused(allocator: SlotAllocator, slot: int) -> None:
    with pytest.raises(NotReserved):
        allocator.places_of(slots_of([100, slot]))


def test_no_slot_of_a_withdrawn_set_is_given_out(allocator: SlotAllocator) -> None:
    allocator.withdraw(FIRST)
    assert (allocator.slot_count, allocator.free_count_in(None)) == (4, 4)
    with pytest.raises(TierFull):
        allocator.take(1, [FIRST])


def test_a_set_is_removed_only_when_all_its_slots_are_free(allocator: SlotAllocator) -> None:
    places = allocator.take(1, [FIRST])
    allocator.withdraw(FIRST)
    with pytest.raises(AssertionError):
        allocator.remove_set(FIRST)
    allocator.release(places)
    allocator.remove_set(FIRST)
    with pytest.raises(NotReserved):
        allocator.places_of(slots_of([100]))


def test_places_of_a_removed_set_serve_the_next_one(allocator: SlotAllocator) -> None:
    allocator.withdraw(FIRST)
    allocator.remove_set(FIRST)
    allocator.add_set(SlabSetId(3), 300)
    assert allocator.place_count == 8
    assert allocator.slots_of(allocator.take(4, [SlabSetId(3)])).tolist() == [300, 301, 302, 303]
