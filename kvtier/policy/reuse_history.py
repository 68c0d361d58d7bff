"""What is remembered of blocks that were asked for, whether they are here or gone: a table of fixed
size that forgets the oldest.

Set-associative: a block's key names one set of WAYS entries, and a new one takes the place of the
set's entry used longest ago. So its memory is known from the start, nothing is ever moved, a block
that comes or goes changes nothing here, and a whole chain is found by a few operations on columns.
21 bytes an entry.

Times are seconds above 0; an entry of time 0 is empty.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.policy.eviction import Keys

WAYS = 8

# Keys of a trace are small numbers, which would crowd; and the key of an empty entry is 0.
_MIX, _SALT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x5851F42D4C957F2D)
# Eight comparisons with a set, as one word, times this: the highest byte is the way that was equal.
_WAY_OF_WORD, _TOP_BYTE = np.uint64(0x0001020304050607), np.uint64(56)
# Looking at an entry to see that it is empty costs an eighth of copying it.
_LOOKED_PER_SAMPLED = 8

Places = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


class Waits(NamedTuple):
    """Of many blocks: their times of last use and their classes."""

    used_at: npt.NDArray[np.float64]
    kind: npt.NDArray[np.int16]


class ReuseHistory:
    """Columns by place. Invariant: no key is in it twice."""

    def __init__(self, count: int) -> None:
        """Room for `count` entries at least."""
        bits = max(0, (max(1, count // WAYS) - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        sets = 1 << bits
        # From zero, so that pages nobody has used take no memory.
        self._keys_by_set = np.zeros((sets, WAYS), np.uint64)
        self._used_at_by_set = np.zeros((sets, WAYS))
        self._keys = self._keys_by_set.reshape(-1)
        self.used_at = self._used_at_by_set.reshape(-1)
        self.kind = np.zeros(sets * WAYS, np.int16)
        self.end_turn = np.zeros(sets * WAYS, np.uint8)  # Of the last request that ended here.
        self.uses = np.zeros(sets * WAYS, np.uint16)
        self.count = 0

    def find(self, keys: Keys) -> tuple[Places, Mask]:
        """Where each is, and whether it is there at all."""
        keys = keys ^ _SALT
        sets = ((keys * _MIX) >> self._shift).view(np.int64)
        same = self._keys_by_set.take(sets, axis=0) == keys[:, None]
        # A word of a set has one byte that is 1, or none: argmax along so short an axis is slow.
        words = same.view(np.uint64)[:, 0]
        sets *= WAYS
        sets += (words * _WAY_OF_WORD >> _TOP_BYTE).view(np.int64)
        return sets, words.astype(np.bool_)

    def claim(self, keys: Keys, places: Places, now: float) -> tuple[Places, Waits | None]:
        """Entries for blocks that have none, each named once, used now; and what was forgotten.

        `places`: what `find` said of them. Should one call want more than WAYS of a set, the last
        of them share an entry: chance has no use for the rest.
        """
        sets, keys = places // WAYS, keys ^ _SALT
        found, forgotten = self._claim_once(keys, sets, now)
        for _ in range(WAYS - 1):
            lost = self._keys[found] != keys  # To another one of these.
            if not np.count_nonzero(lost):
                break
            self.count -= int(lost.sum())
            found[lost], more = self._claim_once(keys[lost], sets[lost], now)
            if forgotten is None:
                forgotten = more
            elif more is not None:
                forgotten = Waits(
                    np.concatenate([forgotten.used_at, more.used_at]),
                    np.concatenate([forgotten.kind, more.kind]),
                )
        return found, forgotten

    def _claim_once(self, keys: Keys, sets: Places, now: float) -> tuple[Places, Waits | None]:
        places = sets * WAYS + self._used_at_by_set.take(sets, axis=0).argmin(axis=1)
        used_at = self.used_at.take(places)
        self._keys[places], self.used_at[places] = keys, now
        taken, forgotten = used_at > 0, None
        if np.count_nonzero(taken):
            taken &= self._keys[places] == keys  # One of several that chose the same place.
            forgotten = Waits(used_at[taken], self.kind[places[taken]])
            self.count -= len(forgotten.kind)
        self.count += len(keys)
        self.uses[places], self.end_turn[places] = 0, 0
        return places, forgotten

    def sample(self, count_max: int) -> tuple[Waits, float]:
        """Some of what is known, a copy, and how many blocks each of these stands for."""
        looked_max = _LOOKED_PER_SAMPLED * count_max
        step = max(1, -(-self.count // count_max), -(-len(self.used_at) // looked_max))
        # Whole sets: their ways fill up in turn.
        used_at = self._used_at_by_set[::step].reshape(-1)
        places = (used_at > 0).nonzero()[0]
        kind = self.kind.reshape(-1, WAYS)[::step].reshape(-1)
        return Waits(used_at[places], kind[places]), float(step)
