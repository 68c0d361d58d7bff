"""Swap or recompute: what becomes of a request whose device blocks are taken; pure.

A swapped request's blocks come back through kvtier, and what fills no whole block is computed; a
recomputed one is computed as if it were new. The choice of PagedAttention (Kwon et al., SOSP 2023,
section 4.5), made anew at each preemption from what is measured: what a token of a prefill takes,
how many blocks a second onboards have brought lately, and how many are still to come.

    recompute = tokens * seconds a token
    swap      = (blocks + blocks queued) / blocks a second + tokens of the tail * seconds a token

Each choice is counted, and so is its regret once the request runs again: what it took more than the
other way would have, by the rates known then.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from kvtier.policy.link import RATE_WEIGHT, LinkTime
from kvtier.policy.retries import Retries


class Preemption(StrEnum):
    """How preempted requests come back."""

    SWAP = "swap"  # vocabulary: PagedAttention's word for this mode
    RECOMPUTE = "recompute"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Victim:
    """A request whose device blocks are being taken."""

    token_count: int  # To have again before it goes on.
    block_count: int  # Full blocks of these.
    block_tokens: int

    @property
    def tail_count(self) -> int:
        """Tokens that no full block holds."""
        return self.token_count - self.block_count * self.block_tokens


@dataclass(slots=True)
class _Choice:
    preemption: Preemption
    victim: Victim
    began_at: float | None = None  # Its blocks were asked for.


class PreemptionRule:
    """One engine's; `now` is any clock's seconds."""

    def __init__(self, mode: Preemption) -> None:
        self._mode = mode
        self._choices: dict[str, _Choice] = {}  # Of requests that have not come back.
        self._queued_count = 0
        self._link_time = LinkTime()
        self._retries = Retries()
        self.token_seconds: float | None = None
        self.blocks_per_second: float | None = None
        self.counts: Counter[Preemption] = Counter()
        self.regret_seconds = dict.fromkeys((Preemption.SWAP, Preemption.RECOMPUTE), 0.0)

    def note_prefill(self, token_seconds: float) -> None:
        """What a token of a prefill takes now."""
        self.token_seconds = token_seconds

    def note_queued(self, block_count: int) -> None:
        """So many blocks are to be onboarded, for whatever request."""
        self._queued_count += block_count

    def note_arrived(self, block_count: int, began_at: float, now: float) -> None:
        """They are there, asked for at `began_at`. They came one request after another."""
        self._queued_count -= block_count
        seconds = self._link_time.take(began_at, now)
        if seconds > 0:
            rate, known = block_count / seconds, self.blocks_per_second
            self.blocks_per_second = rate if known is None else known + RATE_WEIGHT * (rate - known)

    def note_failed(self, block_count: int) -> None:
        """They did not come."""
        self._queued_count -= block_count

    def choose(self, request_id: str, victim: Victim) -> Preemption:
        """What becomes of it, counted. Until both rates are known a swap is tried: it measures."""
        choice = self._mode
        if choice is Preemption.AUTO:
            choice = self._cheaper(victim)
        self.counts[choice] += 1
        self._choices[request_id] = _Choice(choice, victim)
        return choice

    def is_recomputed(self, request_id: str) -> bool:
        """Whether a request that starts again is not to ask kvtier."""
        choice = self._choices.get(request_id)
        return choice is not None and choice.preemption is Preemption.RECOMPUTE

    def note_asked(self, request_id: str, now: float) -> None:
        """The request would start now, if what it is to have again were there."""
        choice = self._choices.get(request_id)
        if choice is not None and choice.began_at is None:
            choice.began_at = now

    def note_back(self, request_id: str, computed_count: int, now: float) -> None:
        """It starts with so many tokens there: settle what the choice has cost."""
        choice = self._choices.pop(request_id, None)
        if choice is None or self.token_seconds is None:
            return
        victim = choice.victim
        waited = 0.0 if choice.began_at is None else now - choice.began_at
        cost = waited + (victim.token_count - computed_count) * self.token_seconds
        if choice.preemption is Preemption.SWAP:
            other = self._recompute_seconds(victim)
        else:
            other = self._onboard_seconds(victim)
        if other is not None and cost > other:
            self.regret_seconds[choice.preemption] += cost - other

    def forget(self, request_id: str) -> None:
        """It does not come back."""
        self._choices.pop(request_id, None)

    def _cheaper(self, victim: Victim) -> Preemption:
        onboard, recompute = self._onboard_seconds(victim), self._recompute_seconds(victim)
        if onboard is None or recompute is None or onboard <= recompute:
            return Preemption.SWAP
        self._retries.note_avoided(recompute)
        is_retry = self._retries.spend(onboard - recompute)
        return Preemption.SWAP if is_retry else Preemption.RECOMPUTE

    def _recompute_seconds(self, victim: Victim) -> float | None:
        return None if self.token_seconds is None else victim.token_count * self.token_seconds

    def _onboard_seconds(self, victim: Victim) -> float | None:
        if self.token_seconds is None or self.blocks_per_second is None:
            return None
        block_count = victim.block_count + self._queued_count
        return block_count / self.blocks_per_second + victim.tail_count * self.token_seconds
