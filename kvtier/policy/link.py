"""What loads over one link have taken lately, and what others would take; pure.

Loads follow one another, so each takes what is left when the one before it has ended; loads that
end at once, or that share the link, are measured together. Beside what
each block takes a load has fixed costs (questions, the engine's steps): a line through what was
measured tells the two apart, by least squares that forget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.types import TierName

# How much a new measurement counts.
RATE_WEIGHT = 0.2
# Sizes that vary less than by this share of their mean tell nothing of fixed costs.
SPREAD_MIN = 0.05
# A load that ends so soon after the one before it, by what it should take, came along with it.
AT_ONCE_SHARE = 0.05
# So many loads at most are measured as one; and for so many ends after one that came before its
# turn, loads share the link, and none of them tells by itself what it takes.
GROUP_LOADS_MAX = 32
SHARED_ENDS = 64

Counts = Mapping[TierName, int]  # Blocks by the tier that they are in.


class LinkTime:
    """When one link got free."""

    def __init__(self) -> None:
        self.free_at = float("-inf")

    def take(self, began_at: float, now: float) -> float:
        """Seconds that a load asked for at `began_at` took by itself; it has ended now."""
        seconds = now - max(began_at, self.free_at)
        self.free_at = now
        return max(0.0, seconds)


class Line:
    """Seconds by blocks."""

    def __init__(self) -> None:
        self._sums = _Sums()
        self._group = 0, 0, 0.0  # What came together last: loads, blocks, seconds.

    def note(self, block_count: int, seconds: float, *, together: bool = False) -> None:
        """`together` with what was noted before: only what all of it took is known."""
        if not together or self._group[0] >= GROUP_LOADS_MAX:
            self._sums, self._group = self._with_group(), (0, 0, 0.0)
        loads, blocks, total = self._group
        self._group = loads + 1, blocks + block_count, total + seconds

    def seconds(self, block_count: int, load_count: int = 1) -> float | None:
        """Of so many blocks in so many loads; None before the first block."""
        sums = self._with_group()
        if sums.x == 0:
            return None
        x, y = sums.x / sums.weight, sums.y / sums.weight
        variance = sums.xx / sums.weight - x * x
        each = y / x
        if variance > (SPREAD_MIN * x) ** 2:
            slope = (sums.xy / sums.weight - x * y) / variance
            each = min(each, max(0.0, slope))  # Neither part is ever below 0.
        return load_count * (y - each * x) + each * block_count

    def _with_group(self) -> _Sums:
        count, x, y = self._group
        if not count:
            return self._sums
        keep = (1.0 - RATE_WEIGHT) ** count
        weight, *others = (keep * one for one in self._sums)
        added = (x, y, x * x / count, x * y / count)
        return _Sums(weight + count, *map(sum, zip(others, added, strict=True)))


class _Sums(NamedTuple):
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What was asked for and has not ended."""

    counts: Counts
    began_at: float


class Link:
    """Blocks of one or several tiers come over it. Not known of a tier: it costs nothing."""

    def __init__(self, seconds_each: Mapping[TierName, float] | None = None) -> None:
        """`seconds_each`: of a block, by tier, until something is measured there."""
        self._first = dict(seconds_each or {})
        self._lines: dict[TierName, Line] = {}
        self._queued: dict[Load, None] = {}  # In the order they were asked for.
        self._queued_loads = dict.fromkeys(TierName, 0)
        self._queued_blocks = dict.fromkeys(TierName, 0)
        self._time = LinkTime()
        self._shared_ends = 0  # Above 0: loads do not end in their order.

    @property
    def queued_count(self) -> int:
        """Loads."""
        return len(self._queued)

    def is_known(self, counts: Counts) -> bool:
        return all(tier in self._first or tier in self._lines for tier in counts)

    def queued(self, tier: TierName) -> tuple[int, int]:
        """Loads and blocks of this tier that are asked for."""
        return self._queued_loads[tier], self._queued_blocks[tier]

    def seconds(self, counts: Counts, load_count: int = 1) -> float:
        """What these take, in so many loads, with nobody before them."""
        return sum(self._tier_seconds(tier, count, load_count) for tier, count in counts.items())

    def queued_seconds(self, now: float) -> float:
        """Until all has come that is asked for.

        Where the first one takes longer than it should, so will those behind it: a tier that has
        become slow must not be asked for more and more until the first answer tells.
        """
        first = next(iter(self._queued), None)
        if first is None:
            return 0.0
        elapsed = now - max(first.began_at, self._time.free_at)
        seconds = sum(
            self._tier_seconds(tier, self._queued_blocks[tier], load_count)
            for tier, load_count in self._queued_loads.items()
            if load_count
        )
        if self._shared_ends:
            return max(elapsed, seconds)  # Whoever comes to share slows those down, too.
        first_seconds = self.seconds(first.counts)
        if elapsed <= first_seconds or first_seconds == 0:
            return seconds - min(elapsed, first_seconds)
        return (seconds - first_seconds) * elapsed / first_seconds

    def begin(self, counts: Counts, now: float) -> Load:
        """So much is asked for. `end` it, whatever comes of it."""
        load = Load(counts, now)
        self._queued[load] = None
        for tier, count in counts.items():
            self._queued_loads[tier] += 1
            self._queued_blocks[tier] += count
        return load

    def end(self, load: Load, came: Counts, now: float) -> None:
        """So much of it has come; nothing of a failed one, which tells nothing.

        Of several tiers at once, the lowest has taken what the others are not known to take.
        """
        is_overtaking = next(iter(self._queued)) is not load
        del self._queued[load]
        for tier, count in load.counts.items():
            self._queued_loads[tier] -= 1
            self._queued_blocks[tier] -= count
        if not came:
            return
        overlaps = load.began_at < self._time.free_at
        seconds = self._time.take(load.began_at, now)
        self._shared_ends = SHARED_ENDS if is_overtaking else max(0, self._shared_ends - 1)
        *others, lowest = (tier for tier in TierName if tier in came)
        seconds -= sum(self._tier_seconds(tier, came[tier]) for tier in others)
        expected = self._tier_seconds(lowest, came[lowest])
        together = overlaps and (self._shared_ends > 0 or seconds < AT_ONCE_SHARE * expected)
        line = self._lines.setdefault(lowest, Line())
        line.note(came[lowest], max(0.0, seconds), together=together)

    def _tier_seconds(self, tier: TierName, block_count: int, load_count: int = 1) -> float:
        line = self._lines.get(tier)
        seconds = None if line is None else line.seconds(block_count, load_count)
        return block_count * self._first.get(tier, 0.0) if seconds is None else seconds
