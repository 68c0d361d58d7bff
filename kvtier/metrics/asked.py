"""Blocks asked for, by call and by namespace: where they were found, or why they were missed.

Counted in plain numbers, which costs the hot path less than the counters of prometheus_client, and
shown when somebody gathers the metrics. So one gathering is one moment: in it, for each call and
for each namespace, hits of all tiers + misses of all reasons = blocks asked for.

At most NAMES_MAX namespaces have a name of their own at a time; the others share OTHER_NAME. A
forgotten one's series go away; what it counted stays in the sums of all namespaces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.metrics.labels import BLOCK_CALLS, MISS_REASONS, TIERS
from kvtier.metrics.registry import Registry
from kvtier.types import NamespaceId, TierName

# A call, a tier and a reason each have a series a namespace: about 45 of them, and every scrape of
# every Prometheus takes them along.
NAMES_MAX = 32
OTHER_NAME = "other"
_LEASING_CALLS = ("acquire", "get")
_NAME_EXAMPLE = f"MODEL@FINGERPRINT, at most {NAMES_MAX}; {OTHER_NAME}"


@dataclass(slots=True)
class Tally:
    """What one call has asked of one namespace."""

    asked_count: int = 0
    hits: dict[TierName, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)

    def note(self, asked_count: int, tiers: Iterable[tuple[TierName, int]], reason: str) -> None:
        self.asked_count += asked_count
        for tier, count in tiers:
            self.hits[tier] = self.hits.get(tier, 0) + count
            asked_count -= count
        assert asked_count >= 0, "more hits than blocks asked for"
        if asked_count:
            self.misses[reason] = self.misses.get(reason, 0) + asked_count

    def add(self, other: Tally) -> None:
        self.asked_count += other.asked_count
        for tier, count in other.hits.items():
            self.hits[tier] = self.hits.get(tier, 0) + count
        for reason, count in other.misses.items():
            self.misses[reason] = self.misses.get(reason, 0) + count


def _tallies() -> dict[str, Tally]:
    return {call: Tally() for call in BLOCK_CALLS}


@dataclass(slots=True)
class _Namespace:
    name: str
    block_bytes: int
    tallies: dict[str, Tally] = field(default_factory=_tallies)
    hit_bytes: dict[TierName, int] = field(default_factory=dict)


class AskedMetrics:
    """Belongs to the event loop."""

    def __init__(self, registry: Registry) -> None:
        calls = {"call": BLOCK_CALLS}
        named = {"namespace": (_NAME_EXAMPLE,)}
        self._registry = registry
        self._asked = registry.counter(
            "kvtier_asked_blocks_total", "Blocks asked for, by the call that asked.", calls
        )
        self._hits = registry.counter(
            "kvtier_hit_blocks_total",
            "Of these, resident (match) or leased (acquire, get), by tier.",
            {**calls, "tier": TIERS},
        )
        self._misses = registry.counter(
            "kvtier_miss_blocks_total", "Of these, not resident, in doubt or cut.", calls
        )
        self._reasons = registry.counter(
            "kvtier_miss_reason_blocks_total",
            "The misses again, by what was wrong with the first block missed: evicted, it was here "
            "lately; unseen, it was not; doubt, it could not be read; no_space, pin_limit, "
            "deadline, unmapped, draining: it was here and could not be leased.",
            {**calls, "reason": MISS_REASONS},
        )
        self._hit_bytes = registry.counter(
            "kvtier_hit_bytes_total", "Payload of the blocks leased, by tier.", {"tier": TIERS}
        )
        self._named_asked = registry.counter(
            "kvtier_namespace_asked_blocks_total",
            "Blocks asked for, by namespace.",
            {**named, **calls},
        )
        self._named_hits = registry.counter(
            "kvtier_namespace_hit_blocks_total",
            "Of these, hits, by tier.",
            {**named, **calls, "tier": TIERS},
        )
        self._named_misses = registry.counter(
            "kvtier_namespace_miss_blocks_total",
            "Of these, misses, by reason.",
            {**named, **calls, "reason": MISS_REASONS},
        )
        self._named_bytes = registry.counter(
            "kvtier_namespace_hit_bytes_total",
            "Payload of the blocks leased, by namespace and tier.",
            {**named, "tier": TIERS},
        )
        self._named_blocks = registry.gauge(
            "kvtier_namespace_resident_blocks", "Resident blocks, by namespace.", named
        )
        self._named_resident = registry.gauge(
            "kvtier_namespace_resident_bytes", "Their payload, each block once.", named
        )
        self._names: dict[NamespaceId, tuple[str, int]] = {}  # And the bytes of a block.
        self._namespaces: dict[NamespaceId, _Namespace] = {}  # Those that were asked for.
        self._other = _Namespace(OTHER_NAME, 0)
        self._gone = _Namespace("", 0)  # What forgotten namespaces had counted.
        self._resident: dict[NamespaceId, int] = {}
        registry.on_gather(self._show)

    # ----------------------------------------------------------------------------- taking note

    def name(self, namespace: NamespaceId, name: str, block_bytes: int) -> None:
        """Once it is asked for blocks it is shown by this name, if there is room for one more."""
        self._names[namespace] = name, block_bytes

    def note(
        self,
        namespace: NamespaceId,
        call: str,
        asked_count: int,
        tiers: Iterable[tuple[TierName, int]],
        reason: str,
    ) -> None:
        """A call asked for blocks; `tiers` says where it found how many, `reason` why not all."""
        self._of(namespace).tallies[call].note(asked_count, tiers, reason)

    def note_resident(self, counts: Iterable[tuple[NamespaceId, int]]) -> None:
        """How many blocks each namespace has, those that have any."""
        self._resident = dict(counts)

    def forget(self, namespace: NamespaceId) -> None:
        """Its series go away and there is room for another name, until it is asked for again."""
        found = self._namespaces.pop(namespace, None)
        if found is None:
            return
        is_shared = found.name == OTHER_NAME
        kept = self._other if is_shared else self._gone
        for call, tally in found.tallies.items():
            kept.tallies[call].add(tally)
        for tier, count in _leased_bytes(found).items():
            kept.hit_bytes[tier] = kept.hit_bytes.get(tier, 0) + count
        if not is_shared:
            self._remove(found.name)

    # ------------------------------------------------------------------------------- questions

    @property
    def named_count(self) -> int:
        return sum(one.name != OTHER_NAME for one in self._namespaces.values())

    def asked_counts(self) -> dict[NamespaceId, int]:
        """Blocks asked for, by each namespace that is not forgotten."""
        return {
            namespace: sum(tally.asked_count for tally in one.tallies.values())
            for namespace, one in self._namespaces.items()
        }

    def hit_count(self, call: str, tier: TierName) -> int:
        """Blocks hit since start."""
        return sum(one.tallies[call].hits.get(tier, 0) for one in self._all())

    # --------------------------------------------------------------------------------- helpers

    def _of(self, namespace: NamespaceId) -> _Namespace:
        found = self._namespaces.get(namespace)
        if found is None:
            name, block_bytes = self._names.get(namespace, (OTHER_NAME, 0))
            if self.named_count >= NAMES_MAX:
                name = OTHER_NAME
            found = self._namespaces[namespace] = _Namespace(name, block_bytes)
        return found

    def _remove(self, name: str) -> None:
        remove = self._registry.remove
        for call in BLOCK_CALLS:
            remove(self._named_asked, name, call)
            for tier in TIERS:
                remove(self._named_hits, name, call, tier)
            for reason in MISS_REASONS:
                remove(self._named_misses, name, call, reason)
        for tier in TIERS:
            remove(self._named_bytes, name, tier)
        remove(self._named_blocks, name)
        remove(self._named_resident, name)

    def _all(self) -> list[_Namespace]:
        return [self._gone, self._other, *self._namespaces.values()]

    def _show(self) -> None:
        total = _Namespace("", 0)
        shown: dict[str, _Namespace] = {}
        for one in self._all():
            named = total if one is self._gone else shown.setdefault(one.name, _Namespace("", 0))
            for call, tally in one.tallies.items():
                named.tallies[call].add(tally)
            for tier, count in _leased_bytes(one).items():
                named.hit_bytes[tier] = named.hit_bytes.get(tier, 0) + count
        for name, one in shown.items():
            if name != OTHER_NAME or any(tally.asked_count for tally in one.tallies.values()):
                self._show_named(name, one)
            for call, tally in one.tallies.items():
                total.tallies[call].add(tally)
            for tier, count in one.hit_bytes.items():
                total.hit_bytes[tier] = total.hit_bytes.get(tier, 0) + count
        self._show_total(total)
        self._show_resident()

    def _show_named(self, name: str, one: _Namespace) -> None:
        follow = self._registry.follow
        for call, tally in one.tallies.items():
            follow(self._named_asked.labels(name, call), tally.asked_count)
            for tier, count in tally.hits.items():
                follow(self._named_hits.labels(name, call, tier), count)
            for reason, count in tally.misses.items():
                follow(self._named_misses.labels(name, call, reason), count)
        for tier, count in one.hit_bytes.items():
            follow(self._named_bytes.labels(name, tier), count)

    def _show_total(self, total: _Namespace) -> None:
        follow = self._registry.follow
        for call, tally in total.tallies.items():
            follow(self._asked.labels(call), tally.asked_count)
            for tier in TierName:
                follow(self._hits.labels(call, str(tier)), tally.hits.get(tier, 0))
            for reason in MISS_REASONS:
                follow(self._reasons.labels(call, reason), tally.misses.get(reason, 0))
            follow(self._misses.labels(call), sum(tally.misses.values()))
        for tier in TierName:
            follow(self._hit_bytes.labels(str(tier)), total.hit_bytes.get(tier, 0))

    def _show_resident(self) -> None:
        blocks = {one.name: 0 for one in self._namespaces.values()}
        resident_bytes = dict(blocks)
        for namespace, count in self._resident.items():
            one = self._namespaces.get(namespace)
            name = OTHER_NAME if one is None else one.name
            _, block_bytes = self._names.get(namespace, (name, 0))
            blocks[name] = blocks.get(name, 0) + count
            resident_bytes[name] = resident_bytes.get(name, 0) + count * block_bytes
        for name, count in blocks.items():
            self._named_blocks.labels(name).set(count)
            self._named_resident.labels(name).set(resident_bytes[name])


def _leased_bytes(one: _Namespace) -> dict[TierName, int]:
    """Of what was leased; and what is known of namespaces that have a row no more."""
    found = dict(one.hit_bytes)
    for call in _LEASING_CALLS:
        for tier, count in one.tallies[call].hits.items():
            found[tier] = found.get(tier, 0) + count * one.block_bytes
    return found
