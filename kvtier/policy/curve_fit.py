"""Fits the curves of all classes at once, to what was seen: work for another thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.policy.reuse_classes import ENDED
from kvtier.policy.reuse_curves import BIN_COUNT, Floats, bins_of, hazards, survivals, worths
from kvtier.policy.reuse_history import Waits

# Ages are counted when there are so many, or when somebody wants to know.
_BATCH = 1 << 15
# So many classes are fitted at a time, in 3 MB.
_FITTED_CLASSES = 128


class Tally:
    """How many blocks of each class were of which age, in bins.

    Ages come by tens, and counting costs by the call: they are counted in batches.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((0, BIN_COUNT))
        self._ages: list[Floats] = []
        self._kinds: list[npt.NDArray[np.int16]] = []
        self._waiting_count = 0

    def note(self, ages: Floats, kinds: npt.NDArray[np.int16]) -> None:
        """The arrays are kept for a while."""
        self._ages.append(ages)
        self._kinds.append(kinds)
        self._waiting_count += len(ages)
        if self._waiting_count >= _BATCH:
            self._count()

    def counts(self, class_count: int) -> Floats:
        """By class and bin; a copy."""
        if self._ages:
            self._count()
        found = np.zeros((class_count, BIN_COUNT))
        found[: len(self._counts)] = self._counts
        return found

    def _count(self) -> None:
        kinds = np.concatenate(self._kinds)
        added = counted(np.concatenate(self._ages), kinds, int(kinds.max(initial=-1)) + 1)
        missing = len(added) - len(self._counts)
        if missing > 0:
            self._counts = np.concatenate([self._counts, np.zeros((missing, BIN_COUNT))])
        self._counts[: len(added)] += added
        self._ages, self._kinds, self._waiting_count = [], [], 0


def counted(ages: Floats, kinds: npt.NDArray[np.int16], class_count: int) -> Floats:
    """By class and bin: how many of these."""
    flat = kinds.astype(np.int64) * BIN_COUNT + bins_of(ages)
    found = np.bincount(flat, minlength=class_count * BIN_COUNT).reshape(-1, BIN_COUNT)
    return found.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Sample:
    """All that a fit needs, so that it can be done elsewhere."""

    reused: Floats  # By class and bin of age.
    forgotten: Floats
    waiting: Waits
    weight: float  # How many blocks each of `waiting` stands for.
    group_of: tuple[int, ...]
    group_count: int
    at: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """By class: the share not used again before each edge of the bins, and what keeping a block is
    worth at the beginning of each bin."""

    survival: Floats
    worth: Floats


def fit(sample: Sample) -> Fitted:
    count = len(sample.group_of)
    waiting = counted(sample.at - sample.waiting.used_at, sample.waiting.kind, count)
    reused, waited = sample.reused, sample.forgotten + sample.weight * waiting
    alive = np.arange(count) != ENDED
    pool = hazards(reused[alive].sum(axis=0), waited[alive].sum(axis=0))
    # The last group is everything: classes in no group lean on it.
    group = np.array(sample.group_of) % (sample.group_count + 1)
    sums = np.zeros((2, sample.group_count + 1, BIN_COUNT))
    np.add.at(sums[0], group, reused)
    np.add.at(sums[1], group, waited)
    priors = hazards(sums[0], sums[1], pool)
    priors[-1] = pool
    found = [
        survivals(hazards(reused[part], waited[part], priors[group[part]]))
        for part in _parts(count)
    ]
    return Fitted(np.concatenate(found), np.concatenate([worths(one) for one in found]))


def _parts(count: int) -> list[slice]:
    return [slice(first, first + _FITTED_CLASSES) for first in range(0, count, _FITTED_CLASSES)]
