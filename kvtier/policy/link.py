"""What loads over one link have taken lately, and what others would take; pure.

Loads follow one another, so each takes what is left when the one before it has ended; those that
end at once are measured together. Or they share the link, as is seen when one overtakes another:
then each has had its part of all the time since it began. Beside what each block takes a load has
fixed costs (questions, the engine's steps): a line through what was measured tells the two apart,
by least squares that forget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.types import TierName

# How much a new measurement counts.
RATE_WEIGHT = 0.2
# Sizes that vary less than by this share of their mean tell nothing of fixed costs.
SPREAD_MIN = 0.05
# A load that ends so soon after the one before it, by what it should take, came along with it.
AT_ONCE_SHARE = 0.05
# So many loads at most are measured as one.
GROUP_LOADS_MAX = 32
# After one that came before its turn loads share the link, until so many have come in their turn
# although one of half the blocks or less had been there nearly as long.
SHARED_ENDS = 64
AS_LONG_SHARE = 0.9

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
    seconds: float  # What it should take by itself, by what was known then.
    had_at: float  # What a load that has always been there had had of the link by then.


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Those that a load asked for now would meet on a link."""

    seconds: float = 0.0  # Until all of them have come, if nothing else is asked for.
    # Of each, what it takes yet by itself, where they share the link; None: they come first.
    left: Sequence[float] | None = None
    slowness: float = 1.0  # How much longer they take than they should.

    def with_later(self, seconds: Sequence[float]) -> UnderWay:
        """And those that are still to begin, but before that load."""
        left = None if self.left is None else (*self.left, *seconds)
        return UnderWay(self.seconds + sum(seconds), left, self.slowness)

    def wait_seconds(self, seconds: float) -> float:
        """How much longer than `seconds`, as by itself, that load takes."""
        if self.left is None:
            return self.seconds
        return (self.slowness - 1.0) * seconds + self.delay_seconds(seconds)

    def delay_seconds(self, seconds: float) -> float:
        """How much longer the others take for it, all together.

        Until the first of two is done both have had as much: each waits for that of the other.
        """
        seconds *= self.slowness
        return sum(min(seconds, one) for one in self.left or ())


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
        # What a load that has always been there has had of the link, all having had equal parts.
        self._had = 0.0
        self._had_until = float("-inf")

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
        first_seconds = self.seconds(first.counts)
        if elapsed <= first_seconds or first_seconds == 0:
            return seconds - min(elapsed, first_seconds)
        return (seconds - first_seconds) * elapsed / first_seconds

    def under_way(self, now: float) -> UnderWay:
        """What was asked for and has not come."""
        if not self._shared_ends:
            return UnderWay(self.queued_seconds(now))
        self._go_on(now)
        had = [(load.seconds, self._had - load.had_at) for load in self._queued]
        slowness = max((part / seconds for seconds, part in had if seconds > 0.0), default=1.0)
        slowness = max(1.0, slowness)
        left = [max(0.0, slowness * seconds - part) for seconds, part in had]
        return UnderWay(sum(left), left, slowness)

    def begin(self, counts: Counts, now: float) -> Load:
        """So much is asked for. `end` it, whatever comes of it."""
        self._go_on(now)
        load = Load(counts, now, self.seconds(counts), self._had)
        self._queued[load] = None
        for tier, count in counts.items():
            self._queued_loads[tier] += 1
            self._queued_blocks[tier] += count
        return load

    def end(self, load: Load, came: Counts, now: float) -> None:
        """So much of it has come; nothing of a failed one, which tells nothing.

        Of several tiers at once, the lowest has taken what the others are not known to take.
        """
        self._go_on(now)
        is_overtaking = next(iter(self._queued)) is not load
        del self._queued[load]
        for tier, count in load.counts.items():
            self._queued_loads[tier] -= 1
            self._queued_blocks[tier] -= count
        if not came:
            return
        overlaps = load.began_at < self._time.free_at
        seconds = self._time.take(load.began_at, now)
        if is_overtaking:
            self._shared_ends = SHARED_ENDS
        elif self._shared_ends and self._is_in_turn(load):
            self._shared_ends -= 1
        if self._shared_ends:
            seconds = self._had - load.had_at
        *others, lowest = (tier for tier in TierName if tier in came)
        seconds -= sum(self._tier_seconds(tier, came[tier]) for tier in others)
        expected = self._tier_seconds(lowest, came[lowest])
        is_group = not self._shared_ends and overlaps and seconds < AT_ONCE_SHARE * expected
        line = self._lines.setdefault(lowest, Line())
        line.note(came[lowest], max(0.0, seconds), together=is_group)

    def _is_in_turn(self, load: Load) -> bool:
        """It has ended. Did they share the link, another would have ended before it."""
        had, count = self._had - load.had_at, sum(load.counts.values())
        return any(
            2 * sum(other.counts.values()) <= count
            and self._had - other.had_at >= AS_LONG_SHARE * had
            for other in self._queued
        )

    def _go_on(self, now: float) -> None:
        if self._queued:
            self._had += max(0.0, now - self._had_until) / len(self._queued)
        self._had_until = now

    def _tier_seconds(self, tier: TierName, block_count: int, load_count: int = 1) -> float:
        line = self._lines.get(tier)
        seconds = None if line is None else line.seconds(block_count, load_count)
        return block_count * self._first.get(tier, 0.0) if seconds is None else seconds
