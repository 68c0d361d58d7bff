"""How likely, and when, a block of some class is used again; and what keeping it is worth.

A *curve* is the distribution of a block's age at its next use. It is estimated as in survival
analysis (Kaplan and Meier, "Nonparametric estimation from incomplete observations", 1958): a block
that still waits, or that was forgotten, says only that it was not used up to its age. Classes with
few observations lean on a group, and groups on all.

What keeping a block of age a is worth is the best of its further times t:

    max over t of  P(used within t) / E(time that it is kept, t at most)

hits for each block-second, the index of Gittins ("Bandit processes and dynamic allocation
indices", 1979). With one class whose hazard falls with age the oldest block has the least: LRU.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BIN_COUNT = 40
AGE_SECONDS_MIN, AGE_SECONDS_MAX = 1.0, 86_400.0
# Bin b holds ages from EDGES[b] up to EDGES[b + 1]; the last one has no end.
EDGES = np.concatenate(
    [[0.0], np.geomspace(AGE_SECONDS_MIN, AGE_SECONDS_MAX, BIN_COUNT - 1), [2 * AGE_SECONDS_MAX]]
)
PRIOR_BLOCKS = 300.0  # How many blocks of its own a class needs to weigh as much as its group.

Floats = npt.NDArray[np.float64]


def bin_of(age_seconds: float) -> int:
    """The bin of an age; negative ages count as none."""
    place = int(np.searchsorted(EDGES, age_seconds, side="right")) - 1
    return min(max(place, 0), BIN_COUNT - 1)


def bins_of(ages: Floats) -> npt.NDArray[np.int64]:
    """Of many."""
    places = np.searchsorted(EDGES, ages, side="right") - 1
    return np.clip(places, 0, BIN_COUNT - 1)


class Observations:
    """Of one class: ages at which blocks were used again, and up to which they were not."""

    __slots__ = ("reused", "waited")

    def __init__(self) -> None:
        self.reused = np.zeros(BIN_COUNT)
        self.waited = np.zeros(BIN_COUNT)

    def __iadd__(self, other: Observations) -> Observations:
        self.reused += other.reused
        self.waited += other.waited
        return self

    @property
    def reached(self) -> Floats:
        """Blocks that were seen to reach each bin unused."""
        total = self.reused + self.waited
        found: Floats = np.cumsum(total[::-1])[::-1]
        return found


def hazards(seen: Observations, prior: Floats | None = None) -> Floats:
    """Chance of use within each bin for a block that has reached it.

    `prior`: hazards that count as PRIOR_BLOCKS further blocks; without one, a bin that nobody
    reached has none.
    """
    reached = seen.reached
    if prior is not None:
        found: Floats = (seen.reused + PRIOR_BLOCKS * prior) / (reached + PRIOR_BLOCKS)
        return found
    none: Floats = np.divide(seen.reused, reached, out=np.zeros(BIN_COUNT), where=reached > 0)
    return none


class Curve:
    """One fitted class. `index[b]`: what keeping a block that enters bin b is worth, in hits a
    block-second."""

    __slots__ = ("index", "survival")

    def __init__(self, hazard: Floats) -> None:
        # At each edge, the last one included: the share that was not used before it.
        self.survival = np.concatenate([[1.0], np.cumprod(1.0 - hazard)])
        self.index = _worth(self.survival)

    def reuse_probability(self, age_seconds: float, seconds: float) -> float:
        """Of a block of this age, within so many seconds."""
        now = self._survival_at(age_seconds)
        if now <= 0.0:
            return 0.0
        return 1.0 - self._survival_at(age_seconds + seconds) / now

    def _survival_at(self, age_seconds: float) -> float:
        return float(np.interp(age_seconds, EDGES, self.survival))


def _worth(survival: Floats) -> Floats:
    """For each bin's beginning the best ratio over all later edges.

    Between two edges the survival falls in a straight line, so the time that a block is kept is the
    area below it, and the best further time ends at an edge.
    """
    widths = np.diff(EDGES)
    areas = np.concatenate([[0.0], np.cumsum(widths * (survival[:-1] + survival[1:]) / 2)])
    used = survival[:-1, None] - survival[None, 1:]
    kept = areas[None, 1:] - areas[:-1, None]
    later = np.arange(1, BIN_COUNT + 1)[None, :] > np.arange(BIN_COUNT)[:, None]
    ratios = np.where(later & (kept > 0), used / np.where(kept > 0, kept, 1.0), 0.0)
    found: Floats = ratios.max(axis=1)
    return found
