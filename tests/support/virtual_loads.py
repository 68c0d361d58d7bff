"""A node in virtual time: a tier's link, the link to the engine, and an engine that computes."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from itertools import count

from kvtier.policy.link import Link, Load
from kvtier.policy.load_or_recompute import (
    LoadRule,
    OnboardChoice,
    OnboardWish,
    copied,
    lower_counts,
)
from kvtier.types import TierName

BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * 128 * 1024  # Of an 8B model.


class VirtualLink:
    """Carries one load after another, or all at once, each at its part of the speed."""

    def __init__(
        self, node: VirtualNode, bytes_per_second: float, latency_seconds: float, *, shared: bool
    ) -> None:
        self._node, self._shared = node, shared
        self.bytes_per_second, self._latency = bytes_per_second, latency_seconds
        # Of each load under way: when it ends, by what every one of them has had by then.
        self._under_way: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._had = self._at = self._free_at = 0.0
        self._plan = 0

    def seconds(self, block_count: int) -> float:
        if block_count == 0:
            return 0.0
        return self._latency + block_count * BLOCK_BYTES / self.bytes_per_second

    def wait(self, block_count: int, later: Sequence[float], after: float = 0.0) -> float:
        """How much longer than by itself a load takes that comes in so many seconds, if nothing
        else comes but what takes `later`, before it."""
        if not self._shared:
            queue = max(0.0, self._free_at - self._node.now)
            return max(0.0, queue + sum(later) - after)
        self._go_on()
        left = [end - self._had for end, _, _ in self._under_way] + list(later)
        own = self.seconds(block_count)
        return min(sum(min(own, one) for one in left), max(0.0, sum(left) - after))

    def carry(self, block_count: int, done: Callable[[], None]) -> None:
        now, seconds = self._node.now, self.seconds(block_count)
        self._free_at = max(self._free_at, now) + seconds
        if not self._shared:
            self._node.after(self._free_at, done)
            return
        self._go_on()
        heapq.heappush(self._under_way, (self._had + seconds, next(self._numbers), done))
        self._plan_next()

    def _go_on(self) -> None:
        now = self._node.now
        if self._under_way:
            self._had += (now - self._at) / len(self._under_way)
        self._at = now

    def _plan_next(self) -> None:
        self._plan += 1
        if self._under_way:
            plan = self._plan
            left = max(0.0, self._under_way[0][0] - self._had) * len(self._under_way)
            self._node.after(self._node.now + left, lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return  # Others have come since.
        self._go_on()
        _, _, done = heapq.heappop(self._under_way)
        self._plan_next()
        done()


class VirtualNode:
    """Requests whose prefixes lie in one lower tier, behind what is in memory of them."""

    def __init__(
        self, tier_bytes_per_second: float, token_seconds: float, *, shared: bool = False
    ) -> None:
        """`shared`: links carry all loads at once."""
        self.tier = VirtualLink(self, tier_bytes_per_second, 0.001, shared=shared)
        self.copies = VirtualLink(self, 25e9, 0.0005, shared=shared)
        self._copies_owed: dict[str, float] = {}  # Of requests still being promoted: seconds.
        self.token_seconds = token_seconds
        # Told before anything is measured; it may be wrong by far.
        self.rule = LoadRule(BLOCK_TOKENS, Link({TierName.NVME: BLOCK_BYTES / 1e9}))
        self.rule.token_seconds = token_seconds
        self.now = 0.0
        self.waited_seconds: list[float] = []  # Of each, until its first token.
        self.regret = dict.fromkeys(OnboardChoice, 0.0)  # The simulator's own count.
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    @property
    def mean_seconds(self) -> float:
        """To a first token."""
        return sum(self.waited_seconds) / len(self.waited_seconds)

    def run(
        self,
        wish: OnboardWish,
        request_count: int,
        *,
        gap_seconds: float,
        seed: int = 1,
        at_once: int = 1,
    ) -> None:
        """Requests come `gap_seconds` apart in the mean, so many of them at once; ends when the
        last one has its token."""
        chance = random.Random(seed)
        at = self.now
        for number in range(request_count):
            if number % at_once == 0:
                at += chance.expovariate(1 / (at_once * gap_seconds))
            lower_count, memory_share = int(2 ** chance.uniform(2, 9)), chance.choice((0, 0, 0.5))
            self._run_until(at)
            self._arrive(f"{seed} {number}", int(memory_share * lower_count), lower_count, wish)
        self._run_until(float("inf"))

    def _run_until(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        if until != float("inf"):
            self.now = until

    def _arrive(self, name: str, memory_count: int, lower_count: int, wish: OnboardWish) -> None:
        rule, asked_at = self.rule, self.now
        runs = ((TierName.DRAM, memory_count), (TierName.NVME, lower_count))
        all_count = memory_count + lower_count
        whole = self._whole_seconds(memory_count, lower_count)
        depth = rule.choose(name, runs, self.now, wish)
        lower, promoted_count = lower_counts(runs, depth), max(0, depth - memory_count)
        if depth == 0:
            self._count(name, depth, all_count, 0.0, whole)
            return
        self._copies_owed[name] = self.copies.seconds(depth)

        def on_promoted(load: Load | None) -> None:
            if load is not None:
                rule.promoting.end(load, lower, self.now)
            copy = rule.begin_copy(name, depth, self.now)
            del self._copies_owed[name]
            self.copies.carry(depth, lambda: on_copied(copy))

        def on_copied(load: Load) -> None:
            rule.copying.end(load, copied(depth), self.now)
            self._count(name, depth, all_count, self.now - asked_at, whole)

        if promoted_count:
            promotion = rule.promoting.begin(lower, self.now)
            self.tier.carry(promoted_count, lambda: on_promoted(promotion))
        else:
            on_promoted(None)

    def _whole_seconds(self, memory_count: int, lower_count: int) -> float:
        """What it takes to load it all now, by the true speeds."""
        count, owed = memory_count + lower_count, list(self._copies_owed.values())
        lower = self.tier.wait(lower_count, ()) + self.tier.seconds(lower_count)
        return lower + self.copies.wait(count, owed, lower) + self.copies.seconds(count)

    def _count(self, name: str, depth: int, all_count: int, seconds: float, whole: float) -> None:
        """The simulator's own count of what it took, and of what it regrets."""
        block_seconds = BLOCK_TOKENS * self.token_seconds
        took = seconds + (all_count - depth) * block_seconds
        others = [all_count * block_seconds] if depth else [whole]
        if 0 < depth < all_count:
            others.append(whole)
        made = OnboardChoice.LOAD if depth else OnboardChoice.RECOMPUTE
        self.regret[made] += max(0.0, took - min(others))
        self.waited_seconds.append(took)
        self.rule.settle(name, depth, seconds)

    def after(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), event))
