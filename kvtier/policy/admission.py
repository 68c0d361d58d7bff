"""Which blocks may be written to a tier that wears: those likely enough to be used again.

How likely is enough follows what is left of the write budget: nearly every chain while there is
plenty, only the likeliest when it runs out. A fixed bound would either wear the drive or leave
room unused (docs/policies.md). Decided from a chain's class, so for the chain as a whole: a chain
with a hole is of use up to the hole only.
"""

from __future__ import annotations

from enum import StrEnum

# How likely with all of an hour's bytes left, with three quarters, and with none.
LEAST, USUAL, MOST = 0.05, 0.2, 0.6
_USUAL_SHARE = 0.75


class Admission(StrEnum):
    """What may go down that nobody has used twice and no hint is about."""

    FORECAST = "forecast"  # What is likely to be used again, where the policy can tell.
    ALL = "all"  # Everything, while the budget has room to spare.
    REUSED = "reused"  # Nothing.


def least_probability(budget_share: float) -> float:
    """The least probability of reuse, by the share of the budget that is left."""
    share = min(max(budget_share, 0.0), 1.0)
    if share >= _USUAL_SHARE:
        return USUAL - (share - _USUAL_SHARE) / (1 - _USUAL_SHARE) * (USUAL - LEAST)
    return MOST - share / _USUAL_SHARE * (MOST - USUAL)
