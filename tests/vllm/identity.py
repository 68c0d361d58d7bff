"""When two engines count as having said the same.

Their tokens are equal; or where they first differ, the reference found both nearly equally likely.
A prompt computed in other parts gives other roundings, in any engine and without kvtier, and a near
tie may then fall the other way. Wrong KV is not a rounding: it moves what is likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# In bfloat16 a logit of 16 to 32 has steps of 1/8.
TIE_LOGPROBS = 0.25


@dataclass(frozen=True)
class Said:
    """One request's answer, with what else was likely at each place."""

    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]


def first_difference(reference: Said, other: Said) -> int | None:
    """Where they part in a way that rounding does not explain; None: they said the same."""
    pairs = zip(reference.token_ids, other.token_ids, reference.logprobs, strict=True)
    for index, (wanted, found, likely) in enumerate(pairs):
        if wanted == found:
            continue
        is_tie = found in likely and likely[wanted] - likely[found] <= TIE_LOGPROBS
        return None if is_tie else index
    return None


def differing(references: Sequence[Said], others: Sequence[Said]) -> list[int]:
    """The requests that said something else."""
    pairs = zip(references, others, strict=True)
    return [
        i for i, (ours, theirs) in enumerate(pairs) if first_difference(ours, theirs) is not None
    ]
