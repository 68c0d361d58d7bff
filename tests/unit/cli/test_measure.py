from __future__ import annotations

import math

import pytest

from kvtier.cli.measure import Target, all_met, judge, percentile


@pytest.mark.parametrize(("percent", "figure"), [(0, 1), (50, 50), (99, 99), (100, 100)])
def test_percentile_is_the_smallest_figure_that_so_many_do_not_exceed(
    percent: float, figure: float
) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == figure


def test_percentile_of_nothing_meets_no_target() -> None:
    nothing = percentile([], 50)
    assert math.isnan(nothing)
    assert not Target(at_most=1.0).is_met(nothing)
    assert not Target(at_least=1.0).is_met(nothing)


def test_a_missed_target_is_judged_missed_and_the_bound_is_told() -> None:
    targets = {"fast": Target(at_most=1.0), "large": Target(at_least=2.0)}
    judged = judge({"fast": 1.0, "large": 1.9}, targets)
    assert judged == {
        "fast": {"at_most": 1.0, "met": True},
        "large": {"at_least": 2.0, "met": False},
    }
    assert not all_met(judged)
    assert all_met(judge({"fast": 0.5, "large": 2.0}, targets))
