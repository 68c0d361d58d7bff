"""How likely, and when, a block of some class is used again; and what keeping it is worth.

A *curve* is the distribution of a block's age at its next use. It is estimated as in survival
analysis (Kaplan and Meier, "Nonparametric estimation from incomplete observations", 1958): a block
that still waits, or that was forgotten, says only that it was not used up to its age. Classes with
few observations lean on a group, and groups on all.

What keeping a block of age a is worth is the best of its further times t:

    max over t of  P(used within t) / E(time that it is kept, t at most)

hits for each block-second, the index of Gittins ("Bandit processes and dynamic allocation
indices", 1979). With one class whose hazard falls with age the oldest block has the least: LRU.

Everything is an array whose last axis is the bin of age; those before it are classes.
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


def bins_of(ages: Floats) -> npt.NDArray[np.int64]:
    """The bins of ages; negative ones count as none."""
    places = EDGES[1:-1].searchsorted(ages, side="right")
    return places.astype(np.int64)


def hazards(reused: Floats, waited: Floats, prior: Floats | None = None) -> Floats:
    """Chance of use within each bin for a block that has reached it.

    `reused`, `waited`: how many blocks were used again, or not used up to then, at which age.
    `prior`: hazards that count as PRIOR_BLOCKS further blocks; without one, a bin that nobody
    reached has none.
    """
    total = reused + waited
    # Blocks that were seen to reach each bin unused.
    reached = np.cumsum(total[..., ::-1], axis=-1)[..., ::-1]
    if prior is not None:
        found: Floats = (reused + PRIOR_BLOCKS * prior) / (reached + PRIOR_BLOCKS)
        return found
    none: Floats = np.divide(reused, reached, out=np.zeros_like(total), where=reached > 0)
    return none


def survivals(hazard: Floats) -> Floats:
    """At each edge, the last one included: the share that was not used before it."""
    found = np.ones((*hazard.shape[:-1], BIN_COUNT + 1))
    np.cumprod(1.0 - hazard, axis=-1, out=found[..., 1:])
    return found


def survivals_at(survival: Floats, ages: Floats) -> Floats:
    """Of one block of each class: the share of its class that was not used up to its age."""
    place = np.minimum(bins_of(ages), BIN_COUNT - 1)
    left, right = EDGES[place], EDGES[place + 1]
    part = np.clip((ages - left) / (right - left), 0.0, 1.0)
    lines = np.arange(len(survival))
    before, after = survival[lines, place], survival[lines, place + 1]
    found: Floats = before + part * (after - before)
    return found


def worths(survival: Floats) -> Floats:
    """For each bin's beginning the best ratio over all later edges.

    Between two edges the survival falls in a straight line, so the time that a block is kept is the
    area below it, and the best further time ends at an edge.
    """
    areas = np.zeros_like(survival)
    middles = (survival[..., :-1] + survival[..., 1:]) / 2
    np.cumsum(np.diff(EDGES) * middles, axis=-1, out=areas[..., 1:])
    used = survival[..., :-1, None] - survival[..., None, 1:]
    kept = areas[..., None, 1:] - areas[..., :-1, None]
    later = np.arange(1, BIN_COUNT + 1)[None, :] > np.arange(BIN_COUNT)[:, None]
    ratios = np.divide(used, kept, out=np.zeros_like(used), where=later & (kept > 0))
    found: Floats = ratios.max(axis=-1)
    return found
