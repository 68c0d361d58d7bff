"""Which share of what is asked for would be hit by memory of any size, from a sample.

C. A. Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015, in its form of fixed
size and with its correction (SHARDS-adj). A block is sampled if its mixed key lies below a limit;
the limit sinks when there are too many. Of a sampled block that is asked for again, the bytes of
sampled blocks that were used since, scaled up, are the memory that LRU needs to have it still.

Chains need no care of their own: a chain is touched from its tail to its head, so a block's parent
never needs more memory than the block, and a hit of every single block is a hit of the prefix.
Sampling blocks instead of whole chains makes the error smaller, since blocks of one chain come and
go together; a prefix that everybody shares is in no sample as a whole.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Sequence

import numpy as np

from kvtier.policy.eviction import Keys

SAMPLES_MAX = 16_384  # Some 300 bytes each: 5 MiB.
BINS_PER_DOUBLING = 32
PARTS = 8  # Of the sample, by which its error is told.
_DOUBLINGS = 60
_BINS_A_POINT = 4
_MIX = np.uint64(0x9E3779B97F4A7C15)
_MIX_AGAIN = np.uint64(0xBF58476D1CE4E5B9)
_ALL = 1 << 64


class HitCurve:
    """Told of every request; `hit_ratio` at any time. With `half_life_seconds` what is longer ago
    counts less."""

    def __init__(
        self,
        *,
        rate: float = 1.0,
        samples_max: int = SAMPLES_MAX,
        half_life_seconds: float = math.inf,
    ) -> None:
        self._limit = min(_ALL, int(rate * _ALL))
        self._samples_max, self._half_life = samples_max, half_life_seconds
        self._place: dict[int, int] = {}  # By mixed key: where it stands in the order of use.
        self._bytes: dict[int, int] = {}
        self._largest: list[int] = []  # Negated mixed keys, a heap.
        self._order = _Order(4 * samples_max)
        # By part of the sample, chosen by the key.
        self._bins = np.zeros((PARTS, BINS_PER_DOUBLING * _DOUBLINGS))
        self._sampled = np.zeros(PARTS)  # Accesses that each stands for.
        self.asked_count = 0.0
        self.asked_tokens = 0.0
        self._told_at: float | None = None

    @property
    def sample_count(self) -> int:
        return len(self._place)

    @property
    def rate(self) -> float:
        return self._limit / _ALL

    def note(
        self,
        keys: Keys,
        now: float,
        *,
        block_bytes: int,
        block_tokens: int = 1,
        counted_from: int | None = 0,
    ) -> None:
        """A chain is used, in chain order; blocks from `counted_from` on are asked for (None: it is
        stored only)."""
        self._pass(now)
        if counted_from is not None:
            count = max(0, len(keys) - counted_from)
            self.asked_count += count
            self.asked_tokens += count * block_tokens
        mixed = _mixed(keys)
        if self._limit < _ALL:
            chosen = np.flatnonzero(mixed < np.uint64(self._limit))
        else:
            chosen = np.arange(len(keys))
        if not len(chosen):
            return
        sampled, places = mixed[chosen].tolist(), chosen.tolist()
        if counted_from is not None:
            for key, place in zip(sampled, places, strict=True):
                if place >= counted_from:
                    self._count(key)
        self._touch(sampled, block_bytes)

    def hit_ratio(self, memory_bytes: float) -> float:
        """Of memory of this size under LRU, in blocks asked for."""
        if self.asked_count <= 0:
            return 0.0
        # What the sample has too many or too few of are blocks that are used all the time.
        near = self.asked_count - float(self._sampled.sum())
        bins = self._bins.sum(axis=0)
        place = math.log2(max(1.0, memory_bytes)) * BINS_PER_DOUBLING
        whole = min(int(place), len(bins) - 1)
        hits = near + float(bins[:whole].sum() + bins[whole] * (place - whole))
        return min(1.0, max(0.0, hits / self.asked_count)) if memory_bytes > 0 else 0.0

    def points(self) -> list[tuple[float, float, float]]:
        """(bytes, hit ratio, its error), as far as anything changes, the smallest first.

        The error is twice the standard error: chance is which uses are in the sample, which its
        parts tell, and how many blocks stand for a size, where they are few.
        """
        bins = self._bins.sum(axis=0)
        filled = np.flatnonzero(bins)
        if not len(filled):
            return []
        places = np.arange(int(filled[0]), int(filled[-1]) + _BINS_A_POINT + 1, _BINS_A_POINT)
        below = np.hstack([np.zeros((PARTS, 1)), np.cumsum(self._bins, axis=1)])[:, places]
        hits = below - self._sampled[:, None]
        ratios = (self.asked_count + hits.sum(axis=0)) / self.asked_count
        by_use = PARTS * hits.std(axis=0, ddof=1) / math.sqrt(PARTS) / self.asked_count
        sizes = 2.0 ** (places / BINS_PER_DOUBLING)
        counts = sizes * self.rate * len(self._place) / max(1, self._order.total)
        by_size = np.gradient(ratios, np.log(sizes)) / np.sqrt(np.maximum(counts, 1.0))
        errors = 2.0 * np.hypot(by_use, by_size) * math.sqrt(1.0 - self.rate)
        found = zip(sizes.tolist(), ratios.clip(0.0, 1.0).tolist(), errors.tolist(), strict=True)
        return list(found)

    # --------------------------------------------------------------------------------- helpers

    def _pass(self, now: float) -> None:
        if self._told_at is None:
            self._told_at = now
        passed = now - self._told_at
        if passed < min(60.0, self._half_life):
            return
        self._told_at = now
        kept = 0.5 ** (passed / self._half_life)
        if kept < 1.0:
            self._bins *= kept
            self._sampled *= kept
            self.asked_count *= kept
            self.asked_tokens *= kept

    def _count(self, key: int) -> None:
        weight = _ALL / self._limit
        part = key % PARTS
        self._sampled[part] += weight
        place = self._place.get(key)
        if place is None:
            return
        # Itself has to fit as well; it stands for itself alone.
        needed = self._order.above(place) * weight + self._bytes[key]
        self._bins[part, _bin(needed)] += weight

    def _touch(self, keys: Sequence[int], block_bytes: int) -> None:
        if self._order.used + len(keys) > self._order.room:
            self._compact(len(keys))
        order, places = self._order, self._place
        for key in reversed(keys):  # The head is used last.
            place = places.get(key)
            if place is None:
                heapq.heappush(self._largest, -key)
            else:
                order.add(place, -self._bytes[key])
            self._bytes[key] = block_bytes
            places[key] = order.append(block_bytes)
        while len(places) > self._samples_max:
            key = -heapq.heappop(self._largest)
            self._limit = key
            order.add(places.pop(key), -self._bytes.pop(key))

    def _compact(self, wanted: int) -> None:
        """The same order without what has moved on."""
        ordered = sorted(self._place, key=self._place.__getitem__)
        self._order = _Order(max(self._order.room, 2 * (len(ordered) + wanted)))
        for key in ordered:
            self._place[key] = self._order.append(self._bytes[key])


class _Order:
    """Bytes at places that are given out in order; how many lie above one (a Fenwick tree)."""

    def __init__(self, room: int) -> None:
        self.room, self.used = room, 0
        self._tree = array("q", bytes(8 * (room + 1)))  # A list would grow as it fills.
        self.total = 0

    def append(self, length_bytes: int) -> int:
        place = self.used
        self.used += 1
        self.add(place, length_bytes)
        return place

    def add(self, place: int, length_bytes: int) -> None:
        self.total += length_bytes
        tree, at = self._tree, place + 1
        while at <= self.room:
            tree[at] += length_bytes
            at += at & -at

    def above(self, place: int) -> int:
        tree, at, below = self._tree, place + 1, 0
        while at:
            below += tree[at]
            at -= at & -at
        return self.total - below


def _mixed(keys: Keys) -> Keys:
    """Every bit of the key counts; keys of a trace are small numbers."""
    found = keys * _MIX
    found ^= found >> np.uint64(31)
    found *= _MIX_AGAIN
    return found ^ (found >> np.uint64(27))


def _bin(length_bytes: float) -> int:
    if length_bytes < 1:
        return 0
    place = int(math.log2(length_bytes) * BINS_PER_DOUBLING)
    return min(place, BINS_PER_DOUBLING * _DOUBLINGS - 1)
