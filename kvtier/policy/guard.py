"""Watches whether a learned order beats LRU: two shadow caches see a sample of the chains, one
evicts by what was learned and one by age alone, and whichever had more hits in the last window says
how the cache itself evicts; what was learned gives way to what is clearly more.

A chain belongs to the sample by the key of its first block that its own conversation alone has
used: a system prompt that all share would put all chains into one sample, or none. Shadows are as
large, beside the sample, as the cache is beside everything; they hold no bytes, a few hundred bytes
of books a block. Where they would have fewer than BLOCKS_MIN blocks chance decides which one wins:
then the guard is off, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.policy.class_leaves import Leaves, Times, Worth
from kvtier.policy.eviction import Evictable, EvictionOrder, Keys, only_children
from kvtier.policy.reuse_classes import ENDED

BLOCKS_MIN = 1000
WINDOW_SECONDS = 300.0
# One chain of 2**this many is sampled: few where the cache is large, for they cost as much again.
SAMPLED_BITS_MIN, SAMPLED_BITS_MAX = 4, 6
# Age alone must have had so many times the hits: a few chains more or less are chance, and each
# change of mind costs some.
BETTER_RATIO = 1.05

_MIX, _MASK = 0xD6E8FEB86659FD93, (1 << 64) - 1


class AgeAlone:
    """The worth of blocks of which only their age is known: so the oldest goes first."""

    def of(self, kind: int, used_at: float) -> float:
        return -1.0 if kind == ENDED else 0.0

    def of_all(self, used_at: Times) -> Times:
        found = np.zeros(len(used_at))
        found[2 * ENDED : 2 * ENDED + 2] = -1.0
        return found


class ShadowCache:
    """What would be resident of some chains, did it evict by this worth."""

    def __init__(self, worth: Worth) -> None:
        self._worth = worth
        self._leaves = Leaves()
        self._row_of: dict[int, int] = {}
        self._key_of: list[int] = []
        self._parent: list[int] = []
        self._children: list[int] = []
        self._spare: list[int] = []
        self.hit_count = 0

    def __len__(self) -> int:
        return len(self._row_of)

    def use(self, keys: Sequence[int], now: float, kinds: npt.NDArray[np.int16]) -> None:
        """A request for a chain: counts what leads, and has all of it from now on."""
        row_of = self._row_of
        known = next((i for i, key in enumerate(keys) if key not in row_of), len(keys))
        self.hit_count += known
        if known:
            rows = np.array([row_of[key] for key in keys[:known]], np.intp)
            self._leaves.move(rows, now, kinds[:known])
        if known < len(keys):
            parent = row_of[keys[known - 1]] if known else -1
            self._insert(keys[known:], parent, now, kinds[known:])

    def end(self, keys: Sequence[int]) -> None:
        """The session over this chain has ended."""
        rows = [self._row_of[key] for key in keys if key in self._row_of]
        self._leaves.move(np.array(rows, np.intp), -np.inf, ENDED)

    def change(self, keys: Sequence[int], kinds: npt.NDArray[np.int16]) -> None:
        """These blocks, where they are here, are of other classes from now on."""
        here = [place for place, key in enumerate(keys) if key in self._row_of]
        rows = np.array([self._row_of[keys[place]] for place in here], np.intp)
        self._leaves.move(rows, self._leaves.used_at[rows], kinds[here])

    def shrink(self, count_max: int) -> None:
        excess = len(self) - count_max
        if excess > 0:
            for rows in self._leaves.nominate(excess, self._may_evict, self._chain_of, self._worth):
                self._evict(rows)

    def _insert(
        self, keys: Sequence[int], parent: int, now: float, kinds: npt.NDArray[np.int16]
    ) -> None:
        rows = []
        for key in keys:
            row = self._spare.pop() if self._spare else len(self._key_of)
            if row == len(self._key_of):
                self._key_of.append(key)
                self._parent.append(parent)
                self._children.append(0)
            self._key_of[row], self._parent[row], self._children[row] = key, parent, 0
            self._row_of[key] = row
            if parent >= 0:
                self._children[parent] += 1
            rows.append(row)
            parent = row
        self._leaves.make_room(len(self._key_of))
        self._leaves.insert(np.array(rows, np.intp), np.full(len(rows), now), kinds)
        self._leaves.add(rows[-1])

    def _may_evict(self, row: int) -> Evictable:
        return Evictable.INNER if self._children[row] else Evictable.YES

    def _chain_of(self, row: int, count: int) -> list[int]:
        return only_children(row, count, self._parent, self._children)

    def _evict(self, rows: Sequence[int]) -> None:
        self._leaves.remove(rows)
        for row in rows:
            del self._row_of[self._key_of[row]]
            self._children[row] = 0
        self._spare.extend(rows)
        parent = self._parent[rows[-1]]
        if parent >= 0:
            self._children[parent] -= 1
            if not self._children[parent]:
                self._leaves.add(parent)


class Guard:
    """Told of every request. `order` says how to evict now."""

    def __init__(self, learned: Worth, block_count_max: int) -> None:
        """`learned`: what the cache evicts by, unless the guard says otherwise."""
        bits = (max(1, block_count_max // (2 * BLOCKS_MIN))).bit_length() - 1
        self._bits = min(max(bits, SAMPLED_BITS_MIN), SAMPLED_BITS_MAX)
        self._learned, self._plain = ShadowCache(learned), ShadowCache(AgeAlone())
        self._room: int | None = None  # Blocks a shadow has room for; None before it mattered.
        self._window_from: float | None = None
        self.order = EvictionOrder.UNGUARDED
        # Since the start; of the window they are less what they were when it began.
        self._hits_before = (0, 0)

    @property
    def hit_counts(self) -> tuple[int, int]:
        """Blocks that each shadow had: by what was learned, and by age alone."""
        return self._learned.hit_count, self._plain.hit_count

    def on_request(
        self,
        keys: Keys,
        own_first: int,
        now: float,
        kinds: npt.NDArray[np.int16] | int,
    ) -> None:
        """`own_first`: the first block that this conversation alone has used."""
        if self._room is not None and self._room < BLOCKS_MIN:
            return
        if not self._is_sampled(keys[min(own_first, len(keys) - 1)]):
            return
        names = keys.tolist()
        each = np.full(len(keys), kinds, np.int16) if isinstance(kinds, int) else kinds
        for shadow in (self._learned, self._plain):
            shadow.use(names, now, each)
            # It may grow as the cache does that has evicted nothing yet.
            if self._room is not None:
                shadow.shrink(self._room)
        self._look(now)

    def on_session_end(self, keys: Keys) -> None:
        names = keys.tolist()
        for shadow in (self._learned, self._plain):
            shadow.end(names)

    def on_turn_kind(self, keys: Keys, kinds: npt.NDArray[np.int16]) -> None:
        names = keys.tolist()
        for shadow in (self._learned, self._plain):
            shadow.change(names, kinds)

    def note_full(self, resident_count: int, now: float) -> None:
        """The cache is about to evict, with so many blocks."""
        self._room = max(1, resident_count >> self._bits)
        if self._window_from is None:
            self._window_from, self._hits_before = now, self.hit_counts
        if self._room < BLOCKS_MIN:
            self.order, self._window_from = EvictionOrder.UNGUARDED, None
        elif self.order is EvictionOrder.UNGUARDED:
            self.order = EvictionOrder.LEARNED

    def _look(self, now: float) -> None:
        if self._window_from is None or now - self._window_from < WINDOW_SECONDS:
            return
        learned, plain = (
            count - before for count, before in zip(self.hit_counts, self._hits_before, strict=True)
        )
        if self.order is not EvictionOrder.UNGUARDED:
            if plain > BETTER_RATIO * learned:
                self.order = EvictionOrder.BY_AGE
            elif learned > plain:  # A window without hits tells nothing.
                self.order = EvictionOrder.LEARNED
        self._window_from, self._hits_before = now, self.hit_counts

    def _is_sampled(self, key: np.uint64) -> bool:
        mixed = (int(key) ^ (int(key) >> 29)) * _MIX & _MASK
        return mixed >> (64 - self._bits) == 0
