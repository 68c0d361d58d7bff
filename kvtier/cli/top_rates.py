"""What two answers of Stats tell together: rates, and shares of what happened in between."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.v1 import kvtier_pb2 as pb

_CALLS = ("match", "acquire", "get")


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer, and when it came."""

    at: float
    stats: pb.StatsResponse


class Rates:
    """Between two samples; None wherever there is nothing to divide by, or a daemon began anew."""

    def __init__(self, before: Sample | None, after: Sample) -> None:
        is_comparable = (
            before is not None
            and before.stats.generation == after.stats.generation
            and before.stats.uptime_seconds < after.stats.uptime_seconds
        )
        self._before = before if is_comparable else None
        self._after = after

    def per_second(self, name: str) -> float | None:
        """Of one counter, such as `kvtier_evicted_blocks_total`."""
        grown = self._grown(name)
        if grown is None or self._before is None:
            return None
        return grown / (self._after.at - self._before.at)

    def sum_per_second(self, prefix: str) -> float | None:
        """Of all counters whose names begin so."""
        if self._before is None:
            return None
        names = [name for name in self._after.stats.counters if name.startswith(prefix)]
        grown = sum(self._grown(name) or 0.0 for name in names)
        return grown / (self._after.at - self._before.at)

    def hits_per_second(self, tier: str) -> float | None:
        """Blocks that were found in this tier, whichever call asked."""
        found = [
            self.per_second(f'kvtier_hit_blocks_total{{call="{call}",tier="{tier}"}}')
            for call in _CALLS
        ]
        return None if None in found else sum(one or 0.0 for one in found)

    def hit_share(self, call: str) -> float | None:
        """Of the blocks asked for by this call, how many were hits: 0 to 1."""
        asked = self._grown(f'kvtier_asked_blocks_total{{call="{call}"}}')
        missed = self._grown(f'kvtier_miss_blocks_total{{call="{call}"}}')
        if not asked or missed is None:
            return None
        return (asked - missed) / asked

    def mean(self, histogram: str) -> float | None:
        """Of what a histogram saw in between."""
        count = self._grown(f"{histogram}_count")
        total = self._grown(f"{histogram}_sum")
        return None if not count or total is None else total / count

    def _grown(self, name: str) -> float | None:
        if self._before is None:
            return None
        counters, before = self._after.stats.counters, self._before.stats.counters
        return counters[name] - before.get(name, 0.0) if name in counters else None
