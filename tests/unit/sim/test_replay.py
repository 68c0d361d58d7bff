"""Replays of public traces against figures that another simulator has measured on them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from kvtier.policy.curves import CurvesPolicy
from kvtier.policy.lru import LruPolicy
from kvtier.sim.belady import replay_belady
from kvtier.sim.replay import replay_policy
from kvtier.sim.traces import Trace, read_trace
from tests.support.forms import is_torture

FOLDER = Path(__file__).parents[3] / "benchmarks" / "traces"
# By share of the unique blocks, in percent.
LRU = {
    "mooncake_conversation": {5: 0.2022},
    "mooncake_synthetic": {1: 0.0370, 25: 0.4496},
}
BELADY = {
    "mooncake_conversation": {1: 0.2501},
    "mooncake_synthetic": {1: 0.1820, 10: 0.5097},
}
# Another way to break ties moves a few blocks.
APART_MAX = 0.001


@cache
def trace_of(name: str) -> Trace:
    return read_trace(FOLDER / f"{name}.kvt.jsonl.gz")


def capacity(trace: Trace, percent: int) -> int:
    return trace.unique_count * percent // 100


def test_traces_are_those_that_others_measured() -> None:
    found = {name: trace_of(name) for name in LRU}
    assert {name: (one.access_count, one.unique_count) for name, one in found.items()} == {
        "mooncake_conversation": (276_491, 170_899),
        "mooncake_synthetic": (117_888, 40_148),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", LRU)
def test_lru_hits_what_another_simulator_found(name: str) -> None:
    trace = trace_of(name)
    for percent, expected in LRU[name].items():
        found = replay_policy(trace, LruPolicy, capacity(trace, percent))
        assert found.hit_ratio == pytest.approx(expected, abs=APART_MAX), percent


@pytest.mark.slow
@pytest.mark.parametrize("name", BELADY)
def test_belady_hits_what_another_simulator_found(name: str) -> None:
    trace = trace_of(name)
    for percent, expected in BELADY[name].items():
        found = replay_belady(trace, capacity(trace, percent))
        assert found.hit_ratio == pytest.approx(expected, abs=APART_MAX), percent


# Of policies that learn, by trace and size: what another simulator found, less a point; and LRU's.
CURVES: dict[str, dict[int, tuple[float, float]]] = {
    "mooncake_synthetic": {5: (0.1380, 0.1550), 10: (0.2533, 0.2573)},
}
if is_torture():
    CURVES["mooncake_conversation"] = {1: (0.0950, 0.0544), 10: (0.2935, 0.2882)}
BELOW_LRU_MAX = 0.01


@pytest.mark.slow
@pytest.mark.full_form
@pytest.mark.parametrize("name", CURVES)
def test_curves_hit_what_they_should_and_hardly_less_than_lru(name: str) -> None:
    trace = trace_of(name)
    for percent, (least, lru) in CURVES[name].items():
        found = replay_policy(trace, CurvesPolicy, capacity(trace, percent)).hit_ratio
        assert found >= max(least, lru - BELOW_LRU_MAX), percent
