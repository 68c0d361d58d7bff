from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.core.segments import SegmentBook, Slots, by_segment
from kvtier.layout import SegmentHeader, SlotLayout

SEGMENT_BYTES = 64 << 10
ROWS = 32
SMALL = SlotLayout(4096, 1)  # 16 slots.
LARGE = SlotLayout(9000, 2)  # 2 slots.
A, B, C = (bytes([letter]) * 16 for letter in b"abc")


def make_book(segment_count: int = 3, lane_count: int = 1) -> SegmentBook:
    return SegmentBook(
        segment_bytes=SEGMENT_BYTES,
        segment_count=segment_count,
        row_count_max=ROWS,
        lane_count=lane_count,
    )


def fill(book: SegmentBook, namespace: bytes, layout: SlotLayout, count: int) -> Slots:
    reserved = book.reserve(namespace, layout, count)
    book.commit(reserved.slots)
    assert book.check_invariants() == []
    return reserved.slots


def rows_of(*rows: int) -> npt.NDArray[np.int64]:
    return np.array(rows, np.int64)


def segments_of(slots: Slots) -> list[int]:
    return sorted({slot // ROWS for slot in slots.tolist()})


def test_slots_are_given_from_the_start_of_a_segment_to_its_end() -> None:
    book = make_book()
    assert fill(book, A, SMALL, 10).tolist() == list(range(10))
    assert fill(book, A, SMALL, 8).tolist() == [*range(10, 16), ROWS, ROWS + 1]


def test_a_segment_has_one_namespace() -> None:
    book = make_book()
    assert segments_of(fill(book, A, SMALL, 3)) == [0]
    assert segments_of(fill(book, B, LARGE, 2)) == [1]
    assert segments_of(fill(book, A, SMALL, 3)) == [0]
    assert book.header_of(ROWS + 1).fingerprint == B
    assert book.header_of(ROWS + 1).slot_count == 2


def test_the_oldest_segment_is_reused_whoever_filled_it() -> None:
    book = make_book()
    first = fill(book, A, SMALL, 16)
    fill(book, B, SMALL, 16)
    fill(book, A, SMALL, 16)
    oldest = book.oldest()
    assert oldest is not None
    assert oldest.segment == 0
    reserved = book.reserve(C, LARGE, 1)
    assert reserved.slots.tolist() == [0]
    assert reserved.evicted.tolist() == first.tolist()
    [header] = reserved.bound
    assert (header.segment, header.fingerprint, header.layout) == (0, C, LARGE)
    assert header.sequence > oldest.sequence


def test_a_segment_that_is_still_being_filled_is_reused_in_its_turn() -> None:
    book = make_book(segment_count=1)
    fill(book, A, SMALL, 2)
    reserved = book.reserve(B, SMALL, 1)
    assert reserved.evicted.tolist() == [0, 1]
    book.commit(reserved.slots)
    assert fill(book, A, SMALL, 1).tolist() == [0]
    assert book.header_of(0).fingerprint == A


def test_a_segment_with_a_pinned_slot_is_skipped() -> None:
    book = make_book()
    slots = fill(book, A, SMALL, 48)
    book.pin(slots[3:4])
    book.pin(slots[3:4])
    assert segments_of(book.reserve(B, SMALL, 1).slots) == [1]
    book.unpin(slots[3:4])
    assert segments_of(book.reserve(C, SMALL, 1).slots) == [2]
    book.unpin(slots[3:4])
    assert book.oldest() is not None
    assert book.check_invariants() == []


def test_what_is_reserved_is_not_reused() -> None:
    book = make_book(segment_count=2)
    reserved = book.reserve(A, SMALL, 32)
    assert len(reserved.slots) == 32
    assert book.reserve(B, SMALL, 4).slots.tolist() == []
    book.commit(reserved.slots[:16])
    assert book.reserve(B, SMALL, 20).slots.tolist() == list(range(16)), "cut, not refused"
    assert book.check_invariants() == []


def test_the_capacity_is_exact() -> None:
    book = make_book(segment_count=3)
    reserved = book.reserve(A, LARGE, 1000)
    assert len(reserved.slots) == 6
    assert len(set(reserved.slots.tolist())) == 6
    assert reserved.evicted.tolist() == []


def test_a_slot_count_is_bounded_by_the_rows_of_the_table() -> None:
    book = SegmentBook(segment_bytes=SEGMENT_BYTES, segment_count=1, row_count_max=8)
    assert book.slot_count(SMALL) == 8
    assert book.slot_count(SlotLayout(SEGMENT_BYTES + 1, 1)) == 0


def test_a_segment_of_which_all_blocks_went_is_free() -> None:
    book = make_book(segment_count=2)
    slots = fill(book, A, SMALL, 17)
    assert book.free_segment_count == 0
    book.void(slots[:16])
    assert book.free_segment_count == 1
    book.void(slots[16:])
    assert book.free_segment_count == 1, "it is still being filled"
    assert segments_of(fill(book, A, SMALL, 1)) == [1]
    assert book.check_invariants() == []


def test_a_hole_is_not_filled_and_an_aborted_slot_is_one() -> None:
    book = make_book()
    slots = book.reserve(A, SMALL, 3).slots
    book.abort(slots[1:2])
    book.commit(slots[[0, 2]])
    book.void(slots[0:1])
    assert fill(book, A, SMALL, 1).tolist() == [3]
    assert book.ready_slots(0).tolist() == [2, 3]


def test_lanes_are_filled_in_turn_and_one_may_be_full() -> None:
    book = make_book(segment_count=4, lane_count=2)
    slots = fill(book, A, SMALL, 6)
    assert [slot // ROWS % 2 for slot in slots.tolist()] == [0, 1] * 3
    assert slots.tolist() == [0, ROWS, 1, ROWS + 1, 2, ROWS + 2]
    book.pin(slots)
    book.pin(fill(book, A, SMALL, 58))
    assert book.reserve(B, SMALL, 2).slots.tolist() == []


def test_recovered_segments_go_on_where_they_stopped() -> None:
    book = make_book(segment_count=4)
    book.take_sequences(100)
    old = SegmentHeader(2, A, SMALL, 16, sequence=5)
    new = SegmentHeader(0, A, SMALL, 16, sequence=9)
    empty = SegmentHeader(1, B, LARGE, 2, sequence=7)
    book.adopt([(new, rows_of(0, 3)), (old, rows_of(15)), (empty, rows_of())])
    assert book.check_invariants() == []
    assert book.ready_count == 3
    assert book.free_segment_count == 2
    assert fill(book, A, SMALL, 1).tolist() == [4]
    oldest = book.oldest()
    assert oldest is not None
    assert oldest.segment == 2


@pytest.mark.parametrize("seed", range(20))
def test_a_recovered_book_says_the_same_of_every_slot(seed: int) -> None:
    chance = random.Random(seed)
    before = make_book(segment_count=6, lane_count=2)
    for namespace, layout in ((A, SMALL), (B, LARGE), (A, SMALL), (C, SMALL)):
        slots = fill(before, namespace, layout, chance.randrange(1, 20))
        before.void(np.array([one for one in slots.tolist() if chance.random() < 0.3], np.uint32))
    numbers = [number for number in range(6) if len(before.ready_slots(number))]
    rows = {number: before.ready_slots(number).astype(np.int64) % ROWS for number in numbers}
    lives = [(before.header_of(number * ROWS), rows[number]) for number in numbers]
    chance.shuffle(lives)
    book = make_book(segment_count=6, lane_count=2)
    book.take_sequences(1000)
    book.adopt(lives)
    assert book.check_invariants() == []
    for number in range(6):
        assert book.ready_slots(number).tolist() == before.ready_slots(number).tolist()
    for number in numbers:
        assert book.header_of(number * ROWS) == before.header_of(number * ROWS)
    held = {slot for number in numbers for slot in before.ready_slots(number).tolist()}
    for namespace in (A, C):
        reserved = book.reserve(namespace, SMALL, 10)
        held -= set(reserved.evicted.tolist())
        assert not held & set(reserved.slots.tolist())


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_of_calls_keeps_the_books(seed: int) -> None:
    chance = random.Random(seed)
    book = make_book(segment_count=6, lane_count=chance.choice((1, 2)))
    reserved: list[int] = []
    ready: list[int] = []
    pinned: list[int] = []
    for _ in range(300):
        action = chance.randrange(6)
        if action < 2:
            namespace, layout = chance.choice(((A, SMALL), (B, LARGE), (C, SMALL)))
            got = book.reserve(namespace, layout, chance.randrange(1, 20))
            assert set(got.evicted.tolist()) <= set(ready) - set(pinned)
            ready = [slot for slot in ready if slot not in set(got.evicted.tolist())]
            assert not set(got.slots.tolist()) & set(ready + reserved)
            reserved += got.slots.tolist()
        elif action == 2 and reserved:
            chance.shuffle(reserved)
            count = chance.randrange(len(reserved)) + 1
            done, reserved = reserved[:count], reserved[count:]
            if chance.random() < 0.8:
                book.commit(np.array(done, np.uint32))
                ready += done
            else:
                book.abort(np.array(done, np.uint32))
        elif action == 3 and ready:
            slot = chance.choice(ready)
            book.pin(np.array([slot], np.uint32))
            pinned.append(slot)
        elif action == 4 and pinned:
            book.unpin(np.array([pinned.pop(chance.randrange(len(pinned)))], np.uint32))
        elif ready:
            gone = [slot for slot in ready if chance.random() < 0.3 and slot not in pinned]
            book.void(np.array(gone, np.uint32))
            ready = [slot for slot in ready if slot not in set(gone)]
        assert book.check_invariants() == []
        assert book.ready_count == len(ready)


def test_a_slot_of_a_former_life_may_lie_behind_the_end_of_the_present_one() -> None:
    book = SegmentBook(segment_bytes=64 << 10, segment_count=1, row_count_max=16)
    small, large = SlotLayout(4096, 1), SlotLayout(32 << 10, 1)
    former = book.reserve(b"a" * 16, small, 16)
    book.commit(former.slots)
    book.commit(book.reserve(b"b" * 16, large, 2).slots)
    sequences = np.full(16, former.bound[0].sequence, dtype=np.uint64)
    groups = list(by_segment(former.slots, 16))
    assert not book.are_ready(former.slots, sequences, groups).any()
    assert [book.is_ready(slot) for slot in (0, 1, 2, 15)] == [True, True, False, False]
