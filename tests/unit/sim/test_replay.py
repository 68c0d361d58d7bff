"""Replays of public traces against figures that another simulator has measured on them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from kvtier.policy.lru import LruPolicy
from kvtier.sim.belady import replay_belady
from kvtier.sim.replay import replay_policy
from kvtier.sim.traces import Trace, read_trace

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
        found = replay_policy(trace, LruPolicy(), capacity(trace, percent))
        assert found.hit_ratio == pytest.approx(expected, abs=APART_MAX), percent


@pytest.mark.slow
@pytest.mark.parametrize("name", BELADY)
def test_belady_hits_what_another_simulator_found(name: str) -> None:
    trace = trace_of(name)
    for percent, expected in BELADY[name].items():
        found = replay_belady(trace, capacity(trace, percent))
        assert found.hit_ratio == pytest.approx(expected, abs=APART_MAX), percent
