"""Rounds of two sides that do the same with the same blocks, in turn: a tier's code and, beside it,
the raw medium or the engine's own client.

In each round each side puts all blocks and gets them back, and who goes first alternates: what the
machine and its neighbours do hits both alike. Ratios are made within a round, and their median is
the figure. Then each puts and gets some blocks one by one: the latency of a lone block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from kvtier.cli.measure import percentile

OURS, RAW = "ours", "raw"
WAYS = ("put", "get")


class Side(Protocol):
    """Blocks by number; raises KVTierError when one does not arrive."""

    def put(self, numbers: Sequence[int]) -> None: ...

    def get(self, numbers: Sequence[int]) -> None: ...

    def forget(self, numbers: Sequence[int]) -> None:
        """They can be put anew; not measured."""
        ...


@dataclass
class Samples:
    """Seconds of one side, one way: of whole batches, and of lone blocks."""

    batches: list[float] = field(default_factory=list)
    singles: list[float] = field(default_factory=list)


Found = dict[tuple[str, str], Samples]


@dataclass(frozen=True, slots=True)
class RoundPlan:
    block_count: int
    round_count: int
    single_count: int  # Lone blocks a round, each way.


def measure_sides(
    sides: dict[str, Side],
    plan: RoundPlan,
    *,
    now: Callable[[], float] = time.perf_counter,
    before_get: Callable[[str], None] = lambda side: None,
    after_get: Callable[[str], None] = lambda side: None,
) -> Found:
    """One round more than asked: what the first one touches for the first time is not counted."""
    found: Found = {(side, way): Samples() for side in sides for way in WAYS}
    everything = range(plan.block_count)
    for number in range(plan.round_count + 1):
        kept: Found = found if number else {key: Samples() for key in found}
        for name in order_of(list(sides), number):
            side = sides[name]
            kept[name, "put"].batches.append(_seconds(now, side.put, everything))
            before_get(name)
            kept[name, "get"].batches.append(_seconds(now, side.get, everything))
            after_get(name)
            side.forget(everything)
        for name in order_of(list(sides), number):
            side, singles = sides[name], list(_singles(plan))
            for one in singles:
                kept[name, "put"].singles.append(_seconds(now, side.put, [one]))
            for one in singles:
                kept[name, "get"].singles.append(_seconds(now, side.get, [one]))
            side.forget(singles)
    return found


def order_of(names: Sequence[str], number: int) -> list[str]:
    """Who goes first alternates."""
    return list(names)[:: -1 if number % 2 else 1]


def figures_of(tier: str, found: Found, batch_bytes: int) -> dict[str, object]:
    """Flat, each name beginning with the tier's."""
    figures: dict[str, object] = {}
    for way in WAYS:
        ours, raw = found[OURS, way], found[RAW, way]
        ratios = [theirs / mine for mine, theirs in zip(ours.batches, raw.batches, strict=True)]
        name = f"{tier}_{way}"
        figures[f"{name}_ratio"] = median(ratios)
        figures[f"{name}_gbps"] = batch_bytes / median(ours.batches) / 1e9
        figures[f"{name}_raw_gbps"] = batch_bytes / median(raw.batches) / 1e9
        for percent in (50, 99):
            figures[f"{name}_p{percent}_ms"] = 1e3 * percentile(ours.singles, percent)
            figures[f"{name}_raw_p{percent}_ms"] = 1e3 * percentile(raw.singles, percent)
        figures[f"{name}_ratios"] = [round(ratio, 3) for ratio in ratios]
    return figures


def _singles(plan: RoundPlan) -> Iterator[int]:
    yield from range(min(plan.single_count, plan.block_count))


def _seconds(
    now: Callable[[], float], work: Callable[[Sequence[int]], None], numbers: Sequence[int]
) -> float:
    began = now()
    work(numbers)
    return now() - began
