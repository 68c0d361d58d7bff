"""What loads over a link are taken to need."""

from __future__ import annotations

import pytest

from kvtier.policy.link import Line, Link, LinkTime
from kvtier.types import TierName

NVME, REMOTE = TierName.NVME, TierName.REMOTE


def test_line_tells_fixed_costs_from_those_of_each_block() -> None:
    line = Line()
    for count in (10, 100, 40):
        line.note(count, 2.0 + 0.5 * count)
    assert line.seconds(1) == pytest.approx(2.5)
    assert line.seconds(1000) == pytest.approx(502.0)


def test_line_through_one_size_starts_at_nothing() -> None:
    line = Line()
    assert line.seconds(5) is None
    line.note(10, 4.0)
    line.note(10, 6.0)
    assert line.seconds(20) == pytest.approx(2 * (0.8 * 4.0 + 6.0) / 1.8)


def test_no_part_of_a_line_is_below_nothing() -> None:
    line = Line()
    line.note(10, 9.0)
    line.note(100, 1.0)  # By the slope between the two a thousand blocks would take less than none.
    assert 1.0 <= (line.seconds(1000) or 0.0) <= 9.0


def test_loads_that_queue_up_are_not_taken_for_a_slow_link() -> None:
    time = LinkTime()
    assert [time.take(0.0, float(end)) for end in (1, 2, 3)] == [1.0, 1.0, 1.0]


def test_of_a_mixed_load_the_lowest_tier_has_what_the_others_leave() -> None:
    link = Link({NVME: 1.0})
    link.end(link.begin({NVME: 10, REMOTE: 5}, 0.0), {NVME: 10, REMOTE: 5}, 60.0)
    assert link.seconds({REMOTE: 5}) == pytest.approx(50.0)
    assert link.seconds({NVME: 10}) == pytest.approx(10.0)


def test_failed_load_leaves_the_queue_and_teaches_nothing() -> None:
    link = Link({NVME: 1.0})
    load = link.begin({NVME: 10}, 0.0)
    assert link.queued_seconds(4.0) == pytest.approx(6.0)
    link.end(load, {}, 90.0)
    assert link.queued_seconds(90.0) == 0.0
    assert link.seconds({NVME: 1}) == 1.0


def test_loads_that_end_at_once_are_measured_as_one() -> None:
    """Copies of one step, say: the last of them takes no time of its own."""
    link = Link({NVME: 1.0})
    loads = [link.begin({NVME: 10}, 0.0) for _ in range(16)]
    for load in loads:
        link.end(load, {NVME: 10}, 160.0)
    assert link.seconds({NVME: 10}) == pytest.approx(10.0)


def test_loads_that_share_a_link_are_measured_as_one() -> None:
    """The small ones overtake the large one, which had its part of the time meanwhile."""
    link = Link({NVME: 1.0})
    large = link.begin({NVME: 30}, 0.0)
    first, second = (link.begin({NVME: 10}, 0.0) for _ in range(2))
    link.end(first, {NVME: 10}, 29.9)
    link.end(second, {NVME: 10}, 30.0)
    link.end(large, {NVME: 30}, 50.0)
    assert link.seconds({NVME: 50}, 3) == pytest.approx(50.0)
    assert link.seconds({NVME: 10}) == pytest.approx(10.0, rel=0.1)


def test_loads_in_their_order_each_tell_what_they_take() -> None:
    link = Link({NVME: 1.0})
    loads = [(link.begin({NVME: count}, 0.0), count) for count in (10, 100, 40)]
    at = 0.0
    for load, count in loads:
        at += 2.0 + 0.5 * count
        link.end(load, {NVME: count}, at)
    assert link.seconds({NVME: 200}) == pytest.approx(102.0)
