"""The slab ledger: each slab in the stock or in one set."""

from __future__ import annotations

import pytest

from kvtier.core.slabs import SlabLedger, SlabSet
from kvtier.types import NamespaceId, SessionId, SlabId

NS = NamespaceId(1)
MINE = SessionId(7)


@pytest.fixture
def ledger() -> SlabLedger:
    ledger = SlabLedger(slab_bytes=100, slab_count_max=4)
    ledger.stock.extend(SlabId(number) for number in range(3))
    return ledger


def bind(ledger: SlabLedger, shard_count: int) -> SlabSet | None:
    return ledger.bind(NS, shard_count=shard_count, slot_bytes=30, now=0.0)


def test_a_set_has_a_slab_for_each_shard_and_new_slot_numbers(ledger: SlabLedger) -> None:
    first, second = bind(ledger, 2), bind(ledger, 1)
    assert first is not None
    assert second is not None
    assert (first.slabs, first.slot_first, first.slot_count) == ((0, 1), 0, 3)
    assert (second.slabs, second.slot_first) == ((2,), 3)
    assert ledger.check_invariants() == []


def test_a_set_that_lacks_a_slab_is_not_bound(ledger: SlabLedger) -> None:
    assert bind(ledger, 4) is None
    assert len(ledger.stock) == 3


def test_pending_slabs_are_those_the_budget_still_lacks(ledger: SlabLedger) -> None:
    bind(ledger, 2)
    assert (ledger.bound_count, ledger.pending_count) == (2, 1)


def test_slot_numbers_of_a_removed_set_are_not_used_again(ledger: SlabLedger) -> None:
    first = bind(ledger, 1)
    assert first is not None
    ledger.remove(first.slab_set)
    second = bind(ledger, 1)
    assert second is not None
    assert second.slot_first == 3
    assert ledger.set_with(first.slabs[0]) is None


def test_a_set_is_held_from_the_offer_until_it_is_unmapped(ledger: SlabLedger) -> None:
    one = bind(ledger, 1)
    assert one is not None
    [slab] = one.slabs
    one.offered_to[slab][MINE] = None
    assert one.is_held()
    one.note_mapped(slab, MINE)
    assert (one.is_held(), one.holders_of(slab)) == (True, [MINE])
    one.note_unmapped(slab, MINE)
    assert not one.is_held()


def test_a_mapping_that_was_not_offered_is_no_news(ledger: SlabLedger) -> None:
    one = bind(ledger, 1)
    assert one is not None
    one.note_mapped(one.slabs[0], MINE)
    assert not one.is_held()


def test_a_slab_in_two_places_is_noticed(ledger: SlabLedger) -> None:
    one = bind(ledger, 1)
    assert one is not None
    ledger.stock.append(one.slabs[0])
    assert ledger.check_invariants() == ["a slab is in the stock and in a set"]
