"""What loads over a link are taken to need."""

from __future__ import annotations

import pytest

from kvtier.policy.link import SHARED_ENDS, Line, Link, LinkTime
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


def test_loads_that_share_a_link_have_each_had_their_part_of_the_time() -> None:
    """The small ones overtake the large one, which had its part of the time meanwhile."""
    link = Link({NVME: 1.0})
    large = link.begin({NVME: 30}, 0.0)
    first, second = (link.begin({NVME: 10}, 0.0) for _ in range(2))
    link.end(first, {NVME: 10}, 30.0)
    link.end(second, {NVME: 10}, 30.0)
    link.end(large, {NVME: 30}, 50.0)
    assert link.seconds({NVME: 50}, 3) == pytest.approx(50.0)
    assert link.seconds({NVME: 10}) == pytest.approx(10.0)


def shared_link() -> Link:
    """Where one load has overtaken another; a block takes a second."""
    link = Link({NVME: 1.0})
    large, small = link.begin({NVME: 2}, 0.0), link.begin({NVME: 1}, 0.0)
    link.end(small, {NVME: 1}, 2.0)
    link.end(large, {NVME: 2}, 3.0)
    return link


def test_who_joins_a_shared_link_waits_and_makes_wait_until_the_smaller_is_done() -> None:
    link = shared_link()
    link.begin({NVME: 30}, 10.0)
    link.begin({NVME: 10}, 10.0)
    met = link.under_way(14.0)  # Both have had 2 s.
    assert met.seconds == pytest.approx(28.0 + 8.0)
    assert met.wait_seconds(9.0) == met.delay_seconds(9.0) == pytest.approx(9.0 + 8.0)
    assert met.wait_seconds(50.0) == pytest.approx(36.0)
    assert met.with_later([3.0]).wait_seconds(9.0) == pytest.approx(20.0)


def test_on_a_link_of_one_load_after_another_nobody_waits_for_who_comes_later() -> None:
    link = Link({NVME: 1.0})
    link.begin({NVME: 30}, 0.0)
    met = link.under_way(10.0)
    assert met.wait_seconds(5.0) == pytest.approx(20.0)
    assert met.delay_seconds(5.0) == 0.0


def test_shared_link_that_has_become_slow_is_slow_for_who_comes_too() -> None:
    link = shared_link()
    link.begin({NVME: 10}, 10.0)
    met = link.under_way(50.0)  # It has had four times what it should take, and has not come.
    assert met.wait_seconds(10.0) == pytest.approx(30.0)
    link.begin({NVME: 20}, 50.0)
    assert link.under_way(50.0).wait_seconds(10.0) == pytest.approx(30.0 + 40.0)


def test_link_is_taken_to_be_in_order_again_when_smaller_loads_wait_their_turn() -> None:
    link, at = shared_link(), 10.0
    for _ in range(2 * SHARED_ENDS):
        large, small = link.begin({NVME: 30}, at), link.begin({NVME: 10}, at)
        link.end(large, {NVME: 30}, at + 30.0)
        link.end(small, {NVME: 10}, at + 40.0)
        at += 40.0
    assert link.under_way(at).left is None
    large, small = link.begin({NVME: 30}, at), link.begin({NVME: 10}, at)
    link.end(small, {NVME: 10}, at + 20.0)
    assert link.under_way(at + 20.0).left == pytest.approx([20.0], rel=0.1)


def test_loads_in_their_order_each_tell_what_they_take() -> None:
    link = Link({NVME: 1.0})
    loads = [(link.begin({NVME: count}, 0.0), count) for count in (10, 100, 40)]
    at = 0.0
    for load, count in loads:
        at += 2.0 + 0.5 * count
        link.end(load, {NVME: count}, at)
    assert link.seconds({NVME: 200}) == pytest.approx(102.0)
