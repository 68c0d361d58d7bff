"""The checker itself: what orders two accesses, and what does not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cuda.race_checker import HOST, Bytespans, DataRace, RaceChecker
from kvtier.cuda.runtime import NO_RANGES, Ranges

BLOCK = Ranges.of((1000, 100))
SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=6)


@pytest.mark.parametrize(
    ("before", "after", "is_race"),
    [
        ((NO_RANGES, BLOCK), (BLOCK, NO_RANGES), True),
        ((BLOCK, NO_RANGES), (NO_RANGES, BLOCK), True),
        ((NO_RANGES, BLOCK), (NO_RANGES, BLOCK), True),
        ((BLOCK, NO_RANGES), (BLOCK, NO_RANGES), False),
        ((NO_RANGES, BLOCK), (Ranges.of((1100, 100)), NO_RANGES), False),
        ((NO_RANGES, BLOCK), (Ranges.of((1099, 1)), NO_RANGES), True),
    ],
)
def test_two_streams_race_where_one_writes_what_both_touch(
    before: tuple[Ranges, Ranges], after: tuple[Ranges, Ranges], is_race: bool
) -> None:
    checker = RaceChecker()
    first, second = checker.add_actor(), checker.add_actor()
    checker.operation(first, "first", *before)
    if not is_race:
        checker.operation(second, "second", *after)
        checker.assert_no_races()
        return
    with pytest.raises(DataRace, match="second and first touch"):
        checker.operation(second, "second", *after)
    with pytest.raises(AssertionError, match="second and first"):
        checker.assert_no_races()


def test_one_stream_is_in_order() -> None:
    checker = RaceChecker()
    stream = checker.add_actor()
    for _ in range(3):
        checker.operation(stream, "write", writes=BLOCK)


def test_an_event_orders_what_was_before_its_record_and_nothing_later() -> None:
    checker = RaceChecker()
    first, second = checker.add_actor(), checker.add_actor()
    checker.operation(first, "write", writes=BLOCK)
    recorded = checker.clock(first)
    checker.operation(first, "later write", writes=Ranges.of((5000, 1)))
    checker.order_after(second, recorded)
    checker.operation(second, "read", reads=BLOCK)
    with pytest.raises(DataRace, match="later write"):
        checker.operation(second, "read on", reads=Ranges.of((5000, 1)))


def test_order_is_passed_on_from_stream_to_stream() -> None:
    checker = RaceChecker()
    streams = [checker.add_actor() for _ in range(3)]
    checker.operation(streams[0], "write", writes=BLOCK)
    checker.order_after(streams[1], checker.clock(streams[0]))
    checker.order_after(streams[2], checker.clock(streams[1]))
    checker.operation(streams[2], "read", reads=BLOCK)


def test_the_host_knows_only_what_it_has_seen_done() -> None:
    checker = RaceChecker()
    stream = checker.add_actor()
    done = checker.operation(stream, "copy", writes=BLOCK)
    with pytest.raises(DataRace):
        checker.operation(HOST, "host reads", reads=BLOCK)
    checker.order_after(HOST, done)
    checker.operation(HOST, "host reads", reads=BLOCK)


def test_what_the_host_has_seen_done_is_before_all_it_submits_later() -> None:
    checker = RaceChecker()
    first, second = checker.add_actor(), checker.add_actor()
    done = checker.operation(first, "copy", writes=BLOCK)
    checker.order_after(HOST, done)
    checker.operation(second, "copy", writes=BLOCK)


def test_a_source_read_in_any_order_is_not_after_what_the_stream_waits_for() -> None:
    checker = RaceChecker()
    compute, copies = checker.add_actor(), checker.add_actor()
    checker.operation(compute, "compute", writes=BLOCK)
    checker.order_after(copies, checker.clock(compute))
    with pytest.raises(DataRace, match="any order"):
        checker.early_read(copies, "copy", BLOCK)


def test_a_source_read_in_any_order_is_over_when_its_copy_is() -> None:
    checker = RaceChecker()
    stream = checker.add_actor()
    checker.early_read(stream, "copy", BLOCK)
    checker.operation(stream, "copy", writes=Ranges.of((9000, 100)))
    checker.operation(stream, "next", writes=BLOCK)
    checker.order_after(HOST, checker.clock(stream))
    checker.operation(HOST, "host writes", writes=BLOCK)


@pytest.mark.parametrize(
    ("reads", "writes"),
    [([(0, 10), (50, 10)], [(100, 10), (109, 5)]), ([(0, 10)], [(9, 1)])],
)
def test_copies_of_one_batch_may_not_meet(
    reads: list[tuple[int, int]], writes: list[tuple[int, int]]
) -> None:
    with pytest.raises(DataRace):
        RaceChecker().unordered("batch", Ranges.of(*reads), Ranges.of(*writes))


def bytes_of(spans: list[tuple[int, int]]) -> set[int]:
    return {byte for start, size in spans for byte in range(start, start + size)}


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(SPANS, SPANS)
def test_spans_overlap_where_they_share_a_byte(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    shared = bytes_of(first) & bytes_of(second)
    hit = Bytespans.of(Ranges.of(*first)).overlap(Bytespans.of(Ranges.of(*second)))
    assert (hit is not None) == bool(shared)
    if hit is not None:
        assert set(range(*hit)) <= shared


def test_a_thousand_streams_of_history_are_forgotten_once_the_host_knows() -> None:
    """Or a long test would compare every access with every other one."""
    checker = RaceChecker()
    stream = checker.add_actor()
    for index in range(1000):
        checker.operation(stream, "copy", writes=Ranges.of((index * 100, 100)))
    checker.order_after(HOST, checker.clock(stream))
    assert checker.open_count == 0
