"""Hit ratios of memory of any size, from a sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtier.policy.hit_curve import HitCurve
from kvtier.policy.lru import LruPolicy
from kvtier.sim.replay import replay_policy
from kvtier.sim.traces import Trace, TracedRequest, numbered, read_trace
from tests.support.forms import is_torture

TRACES = Path(__file__).parents[3] / "benchmarks" / "traces"
TRACE, SIZES = "synthetic", (25_000,)
if is_torture():
    TRACE, SIZES = "conversation", (16_000, 17_089, 20_000, 25_634, 42_724, 85_449, 170_899)


def told(trace: Trace, **options: float) -> HitCurve:
    curve = HitCurve(**options)  # type: ignore[arg-type]
    for request in trace.requests:
        curve.note(request.blocks.astype(np.uint64), request.at, block_bytes=1)
    return curve


def drawn(seed: int, count: int = 300) -> Trace:
    """Chains out of a tree, the first ones far more often than the others."""
    chance = np.random.default_rng(seed)
    found = []
    for number in range(count):
        root = int(chance.geometric(0.15))
        blocks = np.arange(int(chance.integers(1, 30)), dtype=np.int32) + 1000 * root
        found.append(TracedRequest(float(number), 0, 0, blocks))
    return numbered("drawn", 1, found)


@pytest.mark.parametrize("seed", range(3))
def test_of_every_block_it_is_the_exact_replay_but_for_its_bins(seed: int) -> None:
    trace = drawn(seed)
    curve = told(trace)
    for blocks in (10, 40, 90, 200, trace.unique_count):
        # A bin is 2.2 % of a size wide: between the two sizes at its ends.
        low = replay_policy(trace, LruPolicy, int(blocks * 0.97)).hit_ratio
        high = replay_policy(trace, LruPolicy, blocks + 1).hit_ratio
        assert low - 1e-9 <= curve.hit_ratio(blocks) <= high + 1e-9, blocks


@pytest.mark.slow
@pytest.mark.full_form
def test_a_sixteenth_is_within_two_points_where_it_holds_a_thousand_blocks() -> None:
    trace = read_trace(TRACES / f"mooncake_{TRACE}.kvt.jsonl.gz")
    curve = told(trace, rate=1 / 16)
    for blocks in SIZES:
        assert blocks * curve.rate >= 1000
        exact = replay_policy(trace, LruPolicy, blocks).hit_ratio
        assert abs(curve.hit_ratio(blocks) - exact) <= 0.02, blocks


def test_a_prefix_that_everybody_shares_does_not_bend_the_curve() -> None:
    """Whether it is in the sample is chance; either way it is hit by any memory that is no joke."""
    requests = []
    for number in range(1200):
        own = np.arange(2, dtype=np.int32) + 10 + 2 * (number % 400)
        blocks = np.concatenate([np.zeros(1, np.int32), own])
        requests.append(TracedRequest(float(number), 0, 0, blocks))
    found = []
    for first in range(4):
        curve = HitCurve(rate=0.25)
        for one in requests:
            curve.note((one.blocks + 5000 * first).astype(np.uint64), one.at, block_bytes=1)
        found.append(curve.hit_ratio(1200))
    exact = 1 - 801 / 3600
    assert all(abs(one - exact) < 0.03 for one in found), found


def test_memory_is_bounded_whatever_comes() -> None:
    curve = HitCurve(samples_max=256)
    for number in range(400):
        keys = np.arange(50, dtype=np.uint64) + np.uint64(50 * number)
        curve.note(keys, float(number), block_bytes=1)
    assert curve.sample_count == 256
    assert curve.rate == pytest.approx(256 / 20_000, rel=0.3)
    assert curve.hit_ratio(1e6) == pytest.approx(0.0, abs=0.02)


def test_sizes_are_bytes_where_blocks_differ() -> None:
    curve = HitCurve()
    large, small = np.arange(4, dtype=np.uint64), np.arange(4, dtype=np.uint64) + np.uint64(100)
    for now in range(50):
        curve.note(large, now, block_bytes=1 << 20)
        curve.note(small, now, block_bytes=1 << 10)
    assert curve.hit_ratio(3 << 20) < 0.4
    assert curve.hit_ratio(5 << 20) > 0.9


def test_what_is_only_stored_is_not_asked_for_and_counts_as_used() -> None:
    curve = HitCurve()
    keys = np.arange(10, dtype=np.uint64)
    curve.note(keys, 0.0, block_bytes=1, counted_from=None)
    assert curve.asked_count == 0
    curve.note(keys, 1.0, block_bytes=1, counted_from=4)
    assert curve.asked_count == 6
    assert curve.hit_ratio(11) == 1.0


def test_what_is_long_ago_counts_less() -> None:
    curve = HitCurve(half_life_seconds=100.0)
    again = np.arange(10, dtype=np.uint64)
    for now in range(20):
        curve.note(again, float(now), block_bytes=1)
    assert curve.hit_ratio(100) > 0.9
    for number in range(20):
        fresh = np.arange(10, dtype=np.uint64) + np.uint64(100 * (number + 1))
        curve.note(fresh, 1000.0 + number, block_bytes=1)
    assert curve.hit_ratio(100) < 0.1


def test_points_ascend_and_say_what_hit_ratio_says() -> None:
    curve = told(drawn(5), rate=0.5)
    points = curve.points()
    ratios = [ratio for _, ratio, _ in points]
    assert ratios == sorted(ratios)
    assert points[-1][1] == pytest.approx(curve.hit_ratio(2 * points[-1][0]))
    size, ratio, _ = points[len(points) // 2]
    assert ratio == pytest.approx(curve.hit_ratio(size * 1.0001))


def test_the_error_told_is_that_of_the_sample() -> None:
    """Of the same requests under other names, so of other samples: most lie within what is told."""
    trace = drawn(7, 1000)
    exact = told(trace).hit_ratio(150)
    within, sizes = 0, []
    for seed in range(40):
        curve = HitCurve(rate=0.25)
        for request in trace.requests:
            keys = request.blocks.astype(np.uint64) + np.uint64(1_000_003 * seed)
            curve.note(keys, request.at, block_bytes=1)
        error = next(error for size, _, error in curve.points() if size >= 150)
        within += abs(curve.hit_ratio(150) - exact) <= error
        sizes.append(error)
    assert within >= 34
    assert 0.0 < min(sizes) < max(sizes) < 0.3


def test_of_every_block_there_is_no_error() -> None:
    assert {error for _, _, error in told(drawn(8)).points()} == {0.0}
