"""Memory over a tier that wears: what is found, and what is written for it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from kvtier.policy.curves import CurvesPolicy
from kvtier.policy.lru import LruPolicy
from kvtier.sim.replay import replay_policy
from kvtier.sim.traces import Trace, between, read_trace
from kvtier.sim.two_tiers import Rule, replay_two_tiers

FOLDER = Path(__file__).parents[3] / "benchmarks" / "traces"


@cache
def some_minutes() -> Trace:
    return between(read_trace(FOLDER / "mooncake_synthetic.kvt.jsonl.gz"), 0.0, 60.0)


@pytest.mark.slow
def test_exclusive_lru_over_lru_is_one_lru_of_the_summed_size_to_the_block() -> None:
    trace = some_minutes()
    upper, lower = trace.unique_count // 20, trace.unique_count // 5
    found = replay_two_tiers(trace, LruPolicy, (upper, lower), Rule.EXCLUSIVE)
    assert found.upper_hit_count == replay_policy(trace, LruPolicy, upper).hit_count
    both = found.upper_hit_count + found.lower_hit_count
    assert both == replay_policy(trace, LruPolicy, upper + lower).hit_count


@pytest.mark.slow
def test_copies_that_stay_save_writes_and_a_forecast_saves_more() -> None:
    trace = some_minutes()
    sizes = trace.unique_count // 20, trace.unique_count // 5
    exclusive, kept, likely = (
        replay_two_tiers(trace, CurvesPolicy, sizes, rule, least=0.5) for rule in Rule
    )
    assert likely.written_count < kept.written_count < exclusive.written_count
    assert kept.lower_hit_count > 0.8 * exclusive.lower_hit_count
