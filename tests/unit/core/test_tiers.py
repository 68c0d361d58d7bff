"""Slots of a memory tier: owners, pins, and when a slot is free again."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.core.replica import Places, ReplicaState
from kvtier.core.tiers import MemoryTier, Watermarks
from kvtier.errors import TierFull
from kvtier.types import SessionId, SlabSetId

MINE = SessionId(7)


@pytest.fixture
def tier() -> MemoryTier:
    tier = MemoryTier(8)
    tier.add_set(SlabSetId(1), 0)
    return tier


def ready(tier: MemoryTier, count: int) -> Places:
    places = tier.reserve(count, MINE, None)
    tier.commit(places, np.arange(count, dtype=np.int32))
    return places


def is_sound(tier: MemoryTier, *, free: int) -> bool:
    return tier.check_invariants() == [] and tier.allocator.free_count == free


def test_a_reserved_slot_is_free_again_when_it_is_aborted(tier: MemoryTier) -> None:
    places = tier.reserve(3, MINE, None)
    assert (tier.reserved_by, tier.allocator.free_count) == ({MINE: 3}, 5)
    tier.abort(places)
    assert tier.reserved_by == {}
    assert is_sound(tier, free=8)


def test_a_reservation_of_too_many_changes_nothing(tier: MemoryTier) -> None:
    with pytest.raises(TierFull):
        tier.reserve(9, MINE, None)
    assert tier.reserved_by == {}
    assert is_sound(tier, free=8)


def test_a_dropped_replica_frees_its_slot(tier: MemoryTier) -> None:
    tier.drop(ready(tier, 2))
    assert is_sound(tier, free=8)


@pytest.mark.parametrize("kind", ["lease", "transfer"])
def test_a_void_slot_is_held_until_its_last_pin_ends(tier: MemoryTier, kind: str) -> None:
    places = ready(tier, 2)
    pin = tier.pin_for_lease if kind == "lease" else tier.pin_for_transfer
    unpin = tier.unpin_lease if kind == "lease" else tier.unpin_transfer
    pin(places)
    pin(places[:1])
    tier.void(places)
    unpin(places)
    assert tier.held_count() == 1
    assert is_sound(tier, free=7)
    unpin(places[:1])
    assert is_sound(tier, free=8)


def test_a_void_slot_is_held_until_whoever_fills_it_has_ended(tier: MemoryTier) -> None:
    places = tier.reserve(2, MINE, None)
    tier.void(places)
    assert is_sound(tier, free=6)
    assert tier.places_reserved_by(MINE).tolist() == places.tolist()
    tier.abort(places)
    assert is_sound(tier, free=8)


def test_a_pin_ends_once(tier: MemoryTier) -> None:
    places = ready(tier, 1)
    with pytest.raises(AssertionError):
        tier.unpin_lease(places)
    with pytest.raises(AssertionError):
        tier.unpin_transfer(places)


def test_room_for_leases_counts_each_slot_once(tier: MemoryTier) -> None:
    places = ready(tier, 4)
    tier.pin_for_lease(places[:2])
    assert tier.lease_room(places, 3) == 3
    assert tier.lease_room(places, 2) == 2
    assert tier.lease_room(places, 1) == 0
    assert tier.leased_count == 2


def test_all_is_void_at_once_and_free_in_slices(tier: MemoryTier) -> None:
    places = ready(tier, 4)
    reserved = tier.reserve(1, MINE, None)
    tier.pin_for_lease(places[:1])
    tier.void_all()
    assert tier.count_in(ReplicaState.GONE) == 8
    assert is_sound(tier, free=3)
    assert tier.reserve(1, MINE, None).tolist() == [5]  # May be used before the rest is free.
    while tier.free_pending:
        tier.free_some()
    assert is_sound(tier, free=5)
    tier.abort(reserved)
    tier.unpin_lease(places[:1])
    assert is_sound(tier, free=7)


def test_a_slot_freed_in_between_is_not_freed_twice(tier: MemoryTier) -> None:
    places = ready(tier, 2)
    tier.pin_for_lease(places)
    tier.void_all()
    tier.unpin_lease(places)
    while tier.free_pending:
        tier.free_some()
    assert is_sound(tier, free=8)


@pytest.mark.parametrize(("used_count", "eviction_count"), [(0, 0), (90, 0), (91, 11), (100, 20)])
def test_eviction_starts_above_one_mark_and_stops_at_the_other(
    used_count: int, eviction_count: int
) -> None:
    marks = Watermarks(start=0.9, stop=0.8)
    assert marks.eviction_count(slot_count=100, free_count=100 - used_count) == eviction_count
