"""Load or recompute: how deep a resident prefix is loaded, the rest being computed; pure.

A load has two parts: blocks of lower tiers are promoted, then all are copied to the engine. Both
are measured where they happen (link.py), and so is what a token of a prefill takes. To load the
first d of n blocks is to take

    cost(d) = promoting(d) and its wait + copying(d) and its wait + what others wait for it
              + (n - d) * tokens of a block * seconds a token

Copies wait for those of all that were told to load before, also of those whose blocks still are
being promoted, as far as these do not get on meanwhile. Where loads follow one another nobody waits
for a later one. Where they share a link, each takes longer for whoever joins: by counting this, all
together never take longer than if all had loaded or none had (docs/decisions/0023).

Within a run of blocks of one tier the cost hardly bends, so it is least at an end of the run: only
these are compared, and 0, where nothing is loaded and no queue waited for. (That a token costs more
the further back it reads is left out: what is computed are the last blocks. So is what others wait
for the engine while it computes for this one.)

Until the engine has said how long it computes, all is loaded. What is avoided is tried again as
retries.py says, as deep as that pays for. Each choice is counted, and so is its regret once the
request runs: what it took itself more than the better of the other ways, by the rates known then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from kvtier.policy.link import Counts, Link, Load, UnderWay
from kvtier.policy.retries import Retries
from kvtier.types import TierName

Runs = Sequence[tuple[TierName, int]]  # In chain order; DRAM stands for all that is not promoted.

# Fewer blocks than this tell little of a tier.
TRIAL_BLOCKS = 16


class OnboardWish(StrEnum):
    """What a request, or an engine, wants of resident blocks."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class OnboardChoice(StrEnum):
    """What was made of one request."""

    LOAD = "load"  # All or the head of it.
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class _Queues:
    """What a load asked for now meets on each link."""

    promoting: UnderWay
    copying: UnderWay


_NO_QUEUES = _Queues(UnderWay(), UnderWay())


@dataclass(slots=True)
class _Open:
    """A request that does not run yet."""

    runs: Runs
    depth: int
    queues: _Queues
    is_copying: bool = False  # Or has been copied.

    @property
    def made(self) -> OnboardChoice:
        return OnboardChoice.LOAD if self.depth else OnboardChoice.RECOMPUTE

    @property
    def block_count(self) -> int:
        return sum(count for _, count in self.runs)


class LoadRule:
    """One engine's; `now` is any clock's seconds."""

    def __init__(self, block_tokens: int, promoting: Link) -> None:
        """`promoting` has first estimates for lower tiers."""
        self._block_tokens = block_tokens
        self._open: dict[str, _Open] = {}
        self._retries = Retries()
        self.promoting = promoting
        self.copying = Link()  # Whatever tier blocks came from, they are counted as DRAM's.
        self.token_seconds: float | None = None
        self.counts: Counter[OnboardChoice] = Counter()
        self.avoided_count = 0  # Blocks that were there and are computed.
        self.regret_seconds = dict.fromkeys(OnboardChoice, 0.0)

    @property
    def open_ids(self) -> Set[str]:
        """Requests that a choice was made for and that do not run yet."""
        return self._open.keys()

    def choose(
        self, request_id: str, runs: Runs, now: float, wish: OnboardWish = OnboardWish.AUTO
    ) -> int:
        """How many of the first blocks to load, counted. The rest is computed.

        Chosen anew before it runs, the last choice counts.
        """
        self._withdraw(request_id)
        block_count = sum(count for _, count in runs)
        depth, queues = block_count, _NO_QUEUES
        if wish is not OnboardWish.ALWAYS and self.token_seconds is not None:
            queues = _Queues(self.promoting.under_way(now), self._copies(now))
        if wish is OnboardWish.NEVER:
            depth = 0
        elif wish is OnboardWish.AUTO and self.token_seconds is not None:
            depth = self._cheapest(runs, block_count, queues)
        choice = self._open[request_id] = _Open(runs, depth, queues)
        self.counts[choice.made] += 1
        self.avoided_count += block_count - depth
        return depth

    def begin_copy(self, request_id: str, block_count: int, now: float) -> Load:
        """So many of its blocks are being copied to the engine. `copying` is told the end."""
        choice = self._open.get(request_id)
        if choice is not None:
            choice.is_copying = True
        return self.copying.begin(copied(block_count), now)

    def settle(self, request_id: str, loaded_count: int, seconds: float) -> None:
        """The request runs, with so many blocks loaded within so many seconds of waiting."""
        choice = self._open.pop(request_id, None)
        if choice is None or self.token_seconds is None:
            return
        block_count, runs = choice.block_count, choice.runs
        cost = seconds + self._computed_seconds(block_count - loaded_count)
        others = []
        if choice.depth > 0:
            others.append(self._computed_seconds(block_count))
        if choice.depth < block_count and self._is_known(runs, block_count):
            others.append(self._loaded_seconds(runs, block_count, choice.queues)[0])
        self.regret_seconds[choice.made] += max(0.0, cost - min(others, default=cost))

    def forget(self, request_id: str) -> None:
        """It does not run, or begins again."""
        self._open.pop(request_id, None)

    # ------------------------------------------------------------------------------- details

    def _withdraw(self, request_id: str) -> None:
        choice = self._open.pop(request_id, None)
        if choice is not None:
            self.counts[choice.made] -= 1
            self.avoided_count -= choice.block_count - choice.depth

    def _copies(self, now: float) -> UnderWay:
        """Of all that was told to load, also what is not copied yet."""
        depths = [one.depth for one in self._open.values() if one.depth and not one.is_copying]
        return self.copying.under_way(now).with_later(
            [self.copying.seconds(copied(depth)) for depth in depths]
        )

    def _cheapest(self, runs: Runs, block_count: int, queues: _Queues) -> int:
        depths, end = [0], 0
        for _, count in runs:
            end += count
            depths.append(end)

        def cost(depth: int) -> float:
            own, others = self._loaded_seconds(runs, depth, queues)
            return own + others + self._computed_seconds(block_count - depth)

        best = min(reversed(depths), key=cost)
        if best == block_count:
            return best
        least = cost(best)
        self._retries.note_avoided(least)
        trial = block_count
        while not self._retries.spend(cost(trial) - least):
            if trial - best <= TRIAL_BLOCKS:
                return best
            trial = best + max(TRIAL_BLOCKS, (trial - best) // 2)
        return trial

    def _computed_seconds(self, block_count: int) -> float:
        assert self.token_seconds is not None, "the engine has not said how long it computes"
        return block_count * self._block_tokens * self.token_seconds

    def _is_known(self, runs: Runs, depth: int) -> bool:
        return self.copying.is_known(copied(depth)) and self.promoting.is_known(
            lower_counts(runs, depth)
        )

    def _loaded_seconds(self, runs: Runs, depth: int, queues: _Queues) -> tuple[float, float]:
        """What it takes itself, and how much longer others take for it."""
        if depth == 0:
            return 0.0, 0.0
        own = others = 0.0
        if lower := lower_counts(runs, depth):
            seconds = self.promoting.seconds(lower)
            own = queues.promoting.wait_seconds(seconds) + seconds
            others = queues.promoting.delay_seconds(seconds)
        copying, copy = queues.copying, self.copying.seconds(copied(depth))
        still_there = max(0.0, copying.seconds - own)
        own += min(copying.wait_seconds(copy), still_there) + copy
        others += min(copying.delay_seconds(copy), still_there)
        return own, others


def copied(block_count: int) -> Counts:
    """So many blocks on the link to the engine."""
    return {TierName.DRAM: block_count}


def lower_counts(runs: Runs, depth: int) -> Counts:
    """Of the first `depth` blocks, those that are to be promoted."""
    found: dict[TierName, int] = {}
    for tier, count in runs:
        here_count = min(count, depth)
        if here_count > 0 and tier is not TierName.DRAM:
            found[tier] = found.get(tier, 0) + here_count
        depth -= here_count
    return found
