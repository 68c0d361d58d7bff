"""Figures of benchmarks: percentiles, and whether a target was met."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure should be: at most, or at least, so much."""

    at_most: float | None = None
    at_least: float | None = None

    def is_met(self, figure: float) -> bool:
        if math.isnan(figure):
            return False
        above = self.at_least is None or figure >= self.at_least
        return above and (self.at_most is None or figure <= self.at_most)


def percentile(figures: Sequence[float], percent: float) -> float:
    """The smallest figure that `percent` of them do not exceed; NaN of none."""
    if not figures:
        return math.nan
    ordered = sorted(figures)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def judge(figures: Mapping[str, object], targets: Mapping[str, Target]) -> dict[str, object]:
    """For the JSON: each target, and whether the figure of that name meets it."""
    judged: dict[str, object] = {}
    for name, target in targets.items():
        figure = figures[name]
        assert isinstance(figure, float | int), f"{name} is no number"
        bound = {"at_most": target.at_most, "at_least": target.at_least}
        judged[name] = {
            **{word: value for word, value in bound.items() if value is not None},
            "met": target.is_met(figure),
        }
    return judged


def all_met(judged: Mapping[str, object]) -> bool:
    return all(isinstance(one, dict) and one["met"] for one in judged.values())
