"""Reuse curves: what was seen of a class, and what keeping a block is worth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.policy.reuse_curves import (
    BIN_COUNT,
    EDGES,
    Floats,
    bins_of,
    hazards,
    survivals,
    survivals_at,
    worths,
)


def bin_of(age: float) -> int:
    return int(bins_of(np.array([age]))[0])


def seen(reused: dict[float, int], waited: dict[float, int]) -> tuple[Floats, Floats]:
    found = np.zeros((2, BIN_COUNT))
    for which, counts in enumerate((reused, waited)):
        for age, count in counts.items():
            found[which, bin_of(age)] += count
    return found[0], found[1]


@given(st.floats(-10, 1e7))
def test_every_age_is_in_the_bin_that_holds_it(age: float) -> None:
    place = bin_of(age)
    assert 0 <= place < BIN_COUNT
    if 0 <= age < EDGES[-1]:
        assert EDGES[place] <= age < EDGES[place + 1]


def test_blocks_that_wait_count_up_to_their_age_and_no_further() -> None:
    # 10 of 100 are used in the first bin; 50 wait that are younger than the second use.
    hazard = hazards(*seen({0.5: 10, 100.0: 20}, {10.0: 50, 1000.0: 20}))
    assert hazard[bin_of(0.5)] == pytest.approx(10 / 100)
    assert hazard[bin_of(100.0)] == pytest.approx(20 / 40)  # Not 20 of 90.
    assert hazard[bin_of(5000.0)] == 0.0


def test_class_without_observations_is_its_group_and_one_with_many_is_itself() -> None:
    group = hazards(*seen({10.0: 500}, {1000.0: 500}))
    assert hazards(*seen({}, {}), group) == pytest.approx(group)
    own = seen({10.0: 10_000}, {1000.0: 90_000})
    assert hazards(*own, group)[bin_of(10.0)] == pytest.approx(0.1, abs=0.002)


def test_blocks_that_are_used_sooner_are_worth_more() -> None:
    soon, late = (
        worths(survivals(hazards(*seen({age: 50}, {50_000.0: 50})))) for age in (10.0, 1000.0)
    )
    assert soon[0] > late[0]
    # Ten seconds have passed: the first kind will not be used any more, the other one will.
    place = bin_of(60.0)
    assert soon[place] == 0.0
    assert late[place] > late[0]


@settings(deadline=None)
@given(st.lists(st.integers(0, 100), min_size=BIN_COUNT, max_size=BIN_COUNT), st.integers(1, 500))
def test_one_class_whose_hazard_falls_is_lru(counts: list[int], waiting: int) -> None:
    """The rate of use for each second, never rising: the older a block, the less it is worth."""
    rates = np.sort(np.array(counts, float))[::-1] / 1e4
    hazard = 1.0 - np.exp(-np.minimum.accumulate(rates / np.diff(EDGES).cumsum()) * np.diff(EDGES))
    index = worths(survivals(hazard))
    assert (np.diff(index) <= 1e-9 + 1e-6 * index[:-1]).all()


# Smaller ones are lost in the rounding of a difference of two survivals.
CHANCES = st.just(0.0) | st.floats(1e-3, 0.9)


@settings(deadline=None)
@given(st.lists(CHANCES, min_size=BIN_COUNT, max_size=BIN_COUNT))
def test_index_is_the_best_ratio_of_all_further_times(hazard: list[float]) -> None:
    survival_at_edges = survivals(np.array(hazard))
    index = worths(survival_at_edges)
    chance = np.random.default_rng(0)
    for place in (0, 7, 31, BIN_COUNT - 1):
        if survival_at_edges[place] < 1e-6:
            continue  # There is no such block, and differences of areas are rounding.
        start = EDGES[place]
        times = start + (EDGES[-1] - start) * chance.random(40) ** 4
        best = 0.0
        for end in [*times.tolist(), *EDGES[place + 1 :].tolist()]:
            inner = EDGES[(start < EDGES) & (end > EDGES)]
            ages = np.concatenate([[start], inner, [end]])
            survival = np.interp(ages, EDGES, survival_at_edges)
            kept = float(np.trapezoid(survival, ages))
            if kept > 0:
                best = max(best, float(survival[0] - survival[-1]) / kept)
        assert index[place] == pytest.approx(best, rel=1e-6, abs=1e-12)


def test_share_that_was_not_used_falls_in_straight_lines_between_edges() -> None:
    first, other = (hazards(*seen({age: 60, 1000.0: 20}, {50_000.0: 20})) for age in (10.0, 0.5))
    survival = survivals(np.stack([first, other]))
    assert survivals_at(survival, np.array([60.0, 60.0])) == pytest.approx([0.4, 0.4])
    assert survivals_at(survival, np.array([1e6, 1e6])) == pytest.approx([0.2, 0.2])
    assert survivals_at(survival, np.array([0.5, 0.5])) == pytest.approx([1.0, 0.7])
    for age in (3.0, 77.0, 1234.5):
        found = survivals_at(survival, np.array([age, age]))
        assert found[1] == pytest.approx(np.interp(age, EDGES, survival[1]))


def test_classes_are_fitted_as_if_each_were_alone() -> None:
    chance = np.random.default_rng(3)
    hazard = chance.random((7, BIN_COUNT)) * 0.5
    together = worths(survivals(hazard))
    assert together == pytest.approx(np.stack([worths(survivals(one)) for one in hazard]))
