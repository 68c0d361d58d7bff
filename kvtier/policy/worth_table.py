"""What keeping a block is worth, by its class and by its age in steps of a quarter of a bin."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from kvtier.policy.reuse_classes import ENDED
from kvtier.policy.reuse_curves import BIN_COUNT, EDGES, Floats

_PARTS = 4
_STEP_COUNT = _PARTS * BIN_COUNT
_BINS = np.arange(BIN_COUNT + 1)
_STEP_EDGES = np.interp(np.arange(_STEP_COUNT) / _PARTS, _BINS, EDGES)
_STEP_EDGES_LIST: list[float] = _STEP_EDGES.tolist()
_ENDED_WORTH = -1.0


class WorthTable:
    """Told the time. A class of which nothing is learned yet is worth nothing."""

    def __init__(self) -> None:
        self.now = 0.0
        self._by_step = np.zeros((0, _STEP_COUNT + 1))  # By class; before the first step is no age.

    def learn(self, at_bins: Floats) -> None:
        """By class: what a block is worth at the beginning of each bin."""
        self._make_classes(len(at_bins))
        middles = (np.arange(_STEP_COUNT) + 0.5) / _PARTS
        left = middles.astype(np.intp)
        right = np.minimum(left + 1, BIN_COUNT - 1)
        part = middles - left
        found = at_bins[:, left] + part * (at_bins[:, right] - at_bins[:, left])
        self._by_step[: len(at_bins), 1:] = found
        self._by_step[: len(at_bins), 0] = at_bins[:, 0]
        self._by_step[ENDED] = _ENDED_WORTH

    def of(self, kind: int, used_at: float) -> float:
        self._make_classes(kind + 1)
        return float(self._by_step[kind, bisect_right(_STEP_EDGES_LIST, self.now - used_at)])

    def of_all(self, used_at: Floats) -> Floats:
        self._make_classes(len(used_at) // 2)
        steps = _STEP_EDGES.searchsorted(self.now - used_at, side="right")
        kinds = np.arange(len(used_at)) >> 1
        found: Floats = self._by_step[kinds, steps]
        return found

    def _make_classes(self, count: int) -> None:
        missing = count - len(self._by_step)
        if missing > 0:
            self._by_step = np.concatenate([self._by_step, np.zeros((missing, _STEP_COUNT + 1))])
            self._by_step[ENDED] = _ENDED_WORTH
