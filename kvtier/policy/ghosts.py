"""What is remembered of blocks that are not here: a table of fixed size that forgets the oldest.

Set-associative: a block's key names one set of WAYS entries, and a new one takes the place of the
set's entry used longest ago. So its memory is known from the start, nothing is ever moved, and
many blocks are found at once. 24 bytes an entry.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.policy.eviction import Keys

WAYS = 8

_MIX = np.uint64(0x9E3779B97F4A7C15)  # Keys of a trace are small numbers, which would crowd.
_EMPTY = -np.inf

Places = npt.NDArray[np.int64]


class Past(NamedTuple):
    """Of many blocks: what is known of each one's last use, in columns."""

    used_at: npt.NDArray[np.float64]
    kind: npt.NDArray[np.int16]
    end_turn: npt.NDArray[np.uint8]  # Of the last request that ended here; 0: none did.
    uses: npt.NDArray[np.uint16]

    def at(self, places: npt.NDArray[Any] | slice) -> Past:
        return Past(
            self.used_at[places], self.kind[places], self.end_turn[places], self.uses[places]
        )

    def set(self, places: npt.NDArray[Any], past: Past) -> None:
        self.used_at[places], self.kind[places] = past.used_at, past.kind
        self.end_turn[places], self.uses[places] = past.end_turn, past.uses

    @classmethod
    def of_none(cls, count: int) -> Past:
        """Kept from zero, so that pages nobody has used take no memory."""
        return cls(
            np.zeros(count),
            np.zeros(count, np.int16),
            np.zeros(count, np.uint8),
            np.zeros(count, np.uint16),
        )


class GhostTable:
    """Invariant: no key is in it twice."""

    def __init__(self, count: int) -> None:
        """Room for `count` entries at least."""
        bits = max(0, (max(1, count // WAYS) - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        size = WAYS << bits
        self._set_count = 1 << bits
        self._keys = np.zeros(size, dtype=np.uint64)
        self._past = Past.of_none(size)  # An entry of 0 uses is empty.

    def find(self, keys: Keys) -> Places:
        """Where each is; -1: nowhere."""
        first = self._first(keys)
        found = np.full(len(keys), -1, dtype=np.int64)
        ways = first[:, None] + np.arange(WAYS)
        same = (self._keys[ways] == keys[:, None]) & (self._past.uses[ways] > 0)
        hit = same.any(axis=1)
        found[hit] = first[hit] + same[hit].argmax(axis=1)
        return found

    def get(self, places: Places) -> Past:
        return self._past.at(places)

    def set(self, places: Places, past: Past) -> None:
        """Anew what is known of blocks that are in it."""
        self._past.set(places, past)

    def take(self, places: Places) -> None:
        """Forget these: they are here again."""
        self._past.uses[places] = 0

    def add(self, keys: Keys, past: Past) -> Past:
        """Remember blocks that are not in it, each once; returns what was forgotten for them."""
        first = self._first(keys)
        order = np.argsort(first, kind="stable")
        first = first[order]
        number = np.arange(len(first))
        begins = np.concatenate([[True], first[1:] != first[:-1]])[: len(first)]
        rank = number - np.maximum.accumulate(np.where(begins, number, 0))
        fits = rank < WAYS  # More than WAYS at once for one set: chance has no use for the rest.
        order, first, rank = order[fits], first[fits], rank[fits]
        ways = first[:, None] + np.arange(WAYS)
        times = np.where(self._past.uses[ways] > 0, self._past.used_at[ways], _EMPTY)
        places = first + np.argsort(times, axis=1, kind="stable")[np.arange(len(first)), rank]
        forgotten = self._past.at(places[self._past.uses[places] > 0])
        self._keys[places] = keys[order]
        self.set(places, past.at(order))
        return forgotten

    def sample(self, count_max: int) -> tuple[Past, float]:
        """Some of what is known, and how many blocks each of these stands for."""
        step = max(1, -(-len(self._keys) // count_max))
        sets = np.arange(0, self._set_count, step)  # Whole ones: their ways fill up in turn.
        past = self._past.at((sets[:, None] * WAYS + np.arange(WAYS)).reshape(-1))
        return past.at(past.uses > 0), float(step)

    def _first(self, keys: Keys) -> Places:
        if self._set_count == 1:
            return np.zeros(len(keys), dtype=np.int64)
        return ((keys * _MIX) >> self._shift).astype(np.int64) * WAYS
