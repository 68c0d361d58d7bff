"""What may be overwritten of a namespace that is purged, and what must wait."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.erasing_events import (
    EraseBegun,
    EraseEnded,
    HoldRemains,
    HoldSlots,
    RemainsErased,
    SlotsErased,
)
from kvtier.core.segments import SegmentBook
from kvtier.layout import SlotLayout
from kvtier.types import NamespaceId, TierName
from tests.support.world import chain
from tests.unit.core.test_demotions import TieredStory
from tests.unit.core.test_manager import NS, SLOT_BYTES, Story

SEGMENT = 64 << 10
A, B = b"a" * 16, b"b" * 16
LAYOUT = SlotLayout(12_000, 1)  # 5 slots of 12 KiB, and 4 KiB that are none's.
NVME = TierName.NVME


def begin(story: Story) -> None:
    story.world.clear(NS)
    story.world.run_quietly(EraseBegun(story.world.namespaces[NS].fingerprint, NS))
    story.world.finish_turns()


def hold(story: Story, count: int = 100) -> ins.SlotsHeld:
    held = story.world.run(HoldSlots(NS, count))
    assert isinstance(held, ins.SlotsHeld)
    return held


def remains_of(story: Story, segment: int) -> ins.RemainsHeld:
    held = story.world.run(HoldRemains(NVME, segment))
    assert isinstance(held, ins.RemainsHeld)
    return held


@pytest.fixture
def story() -> Story:
    return Story()


def test_every_slot_of_the_namespace_is_held_once_and_comes_back(story: Story) -> None:
    slots = story.offload("abc")
    begin(story)
    first, rest = hold(story, 10), hold(story)
    assert (first.left_count, len(rest.slots)) == (6, 6)
    assert set(slots) <= {*first.slots.tolist(), *rest.slots.tolist()}
    story.world.check([chain("abc")])
    for one in (first, rest):
        story.world.run(SlotsErased(NS, one.slots))
    assert len(hold(story).slots) == 0
    assert story.free_count() == 16


def test_a_slot_under_a_lease_waits_until_it_ends(story: Story) -> None:
    slots = story.offload("ab")
    granted = story.acquire("ab")
    begin(story)
    held = hold(story)
    assert not set(held.slots.tolist()) & set(slots)
    assert (held.leased_count, held.waiting_count) == (2, 2)
    story.world.run(ev.Release(story.session, (granted.lease,)))
    assert set(hold(story).slots.tolist()) == set(slots)


def test_a_reserved_slot_is_recalled_and_waits_until_it_is_back(story: Story) -> None:
    slots = story.reserve(2)
    begin(story)
    assert any(isinstance(one, ins.RecallSlots) for one in story.world.mail[story.session])
    held = hold(story)
    assert not set(held.slots.tolist()) & set(slots)
    assert held.reserved_count == 2
    story.world.run(ev.Abort(story.session, NS, np.array(slots, np.uint32)))
    assert set(hold(story).slots.tolist()) == set(slots)


def test_the_namespace_is_given_no_slots_before_it_ends(story: Story) -> None:
    begin(story)
    assert story.reserve(2) == []
    held = hold(story)
    story.world.run(SlotsErased(NS, held.slots))
    story.world.run_quietly(EraseEnded(story.world.namespaces[NS].fingerprint, NS))
    assert len(story.reserve(2)) == 2


def make_book() -> SegmentBook:
    return SegmentBook(segment_bytes=SEGMENT, segment_count=2, row_count_max=16)


def test_a_segment_of_which_nothing_is_left_is_held_whole_and_free_again_afterwards() -> None:
    book = make_book()
    book.commit(book.reserve(A, LAYOUT, 2).slots)
    book.void_all(A)
    remains = book.hold_remains(0, {A})
    assert remains is not None
    assert (remains.life, remains.ranges) == (None, ((0, SEGMENT),))
    assert book.check_invariants() == []
    assert book.free_segment_count == 1
    assert book.reserve(B, LAYOUT, 1).bound[0].segment == 1
    book.release_remains(0)
    assert book.free_segment_count == 1
    assert book.check_invariants() == []


@pytest.mark.parametrize("is_reserved", [True, False])
def test_a_segment_that_is_read_or_written_waits(is_reserved: bool) -> None:
    book = make_book()
    slots = book.reserve(A, LAYOUT, 1).slots
    if not is_reserved:
        book.commit(slots)
        book.pin(slots)
    book.void_all(A)
    assert book.hold_remains(0, {A}) is None
    if is_reserved:
        book.abort(slots)
    else:
        book.unpin(slots)
    assert book.hold_remains(0, {A}) is not None


def test_of_another_namespaces_segment_only_what_no_block_lies_in_is_held() -> None:
    book = make_book()
    slots = book.reserve(B, LAYOUT, 4).slots
    book.commit(slots[:3])
    book.void(slots[1:2])
    remains = book.hold_remains(0, {A})
    assert remains is not None
    slot_bytes = LAYOUT.slot_bytes
    # Row 1 is void, row 3 is being written, row 4 was never used, 4 KiB behind it are no slot.
    assert remains.ranges == ((slot_bytes, slot_bytes), (4 * slot_bytes, SEGMENT - 4 * slot_bytes))
    assert remains.void_rows == (1,)
    assert book.is_ready(0)
    # Nobody is given what is being overwritten, nor is the segment reused.
    more = book.reserve(B, LAYOUT, 1)
    assert more.slots.tolist() == [16]
    book.commit(slots[3:])
    assert len(book.reserve(A, LAYOUT, 1).slots) == 0
    book.release_remains(0)
    assert len(book.reserve(A, LAYOUT, 1).slots) == 1
    assert book.check_invariants() == []


def test_a_void_block_that_is_still_read_keeps_its_bytes() -> None:
    book = make_book()
    slots = book.reserve(B, LAYOUT, 2).slots
    book.commit(slots)
    book.pin(slots[:1])
    book.void(slots[:1])
    remains = book.hold_remains(0, {A})
    assert remains is not None
    assert remains.ranges[0][0] == 2 * LAYOUT.slot_bytes


def test_what_a_closed_namespace_has_below_is_void_once_its_purge_begins() -> None:
    story = TieredStory()
    story.write_behind("abc")
    story.world.run_quietly(EraseBegun(story.world.namespaces[NS].fingerprint))
    assert remains_of(story, 0).is_whole
    assert remains_of(story, 7).ranges == ((0, 4 * SLOT_BYTES),)
    for segment in (0, 7):
        story.world.run_quietly(RemainsErased(NVME, segment))


def test_another_namespaces_blocks_stay_where_they_are() -> None:
    story = TieredStory()
    other = NamespaceId(7)
    story.world.open_namespace(other, slot_bytes=SLOT_BYTES)
    story.write_behind("abc")
    story.world.run_quietly(EraseBegun(story.world.namespaces[other].fingerprint, other))
    story.world.finish_turns()
    for segment in range(8):
        remains_of(story, segment)
        story.world.run_quietly(RemainsErased(NVME, segment))
    story.world.check([chain("abc")])
    assert story.matched("abc") == 3
