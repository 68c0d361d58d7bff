"""How the workers of one engine share out a block, and the namespace that they make together.

A block is as many shards as there are different parts of it: one for each pipeline stage and each
share of the heads. Workers whose KV is the same (a latent for all heads; fewer KV heads than ranks)
hold the same shard as *replicas*: the shard is stored once, and all of them load it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvtier.errors import ConfigError
from kvtier.namespace import FACT_CHARS_MAX, NamespaceSpec

# Stands for a fact in which the shards differ; the digest of all of them is in `parallel`.
BY_SHARD = "differs by shard"


@dataclass(frozen=True, slots=True)
class Place:
    """One worker among its engine's workers."""

    rank: int = 0
    rank_count: int = 1
    shard: int = 0
    replica: int = 0  # Among those that hold the same shard.
    replica_count: int = 1
    part: str = ""  # What of a block it holds, in words: the same words for equal shards alone.

    def stores(self, job_id: int) -> bool:
        """Whether it is this worker that copies the job's blocks out: replicas take turns."""
        return job_id % self.replica_count == self.replica


def whole_namespace(parts: Mapping[Place, NamespaceSpec]) -> NamespaceSpec:
    """Of all workers, from what each of them knows of its own shard alone.

    Which shards there are, how large and in which order, is part of it. ConfigError when the
    workers cannot be those of one engine.
    """
    places = sorted(parts, key=lambda place: place.rank)
    _check_places(places)
    weights = _merged([parts[place].weights for place in places])
    shards = [
        next((place, parts[place]) for place in places if place.shard == shard)
        for shard in range(max(place.shard for place in places) + 1)
    ]
    for place in places:
        own, shard = replace(parts[place], weights=""), replace(shards[place.shard][1], weights="")
        if own != shard:
            raise ConfigError(
                f"kvtier: ranks {shards[place.shard][0].rank} and {place.rank} of this engine hold"
                " the same KV in different forms; run without kvtier"
            )
    if len(shards) == 1:
        return replace(shards[0][1], weights=weights)
    return _joined([(place.part, replace(spec, weights=weights)) for place, spec in shards])


def _check_places(places: Sequence[Place]) -> None:
    shards: dict[int, list[int]] = {}
    for place in places:
        shards.setdefault(place.shard, []).append(place.replica)
    is_whole = (
        bool(places)
        and [place.rank for place in places] == list(range(places[0].rank_count))
        and sorted(shards) == list(range(len(shards)))
        and all(sorted(shards[place.shard]) == list(range(place.replica_count)) for place in places)
    )
    if not is_whole:  # Else there would be blocks of which nobody stores a shard.
        raise ConfigError("kvtier: this engine's ranks do not make one engine; run without kvtier")


def _joined(shards: Sequence[tuple[str, NamespaceSpec]]) -> NamespaceSpec:
    specs = [spec for _, spec in shards]
    first = specs[0]
    alike = ("model", "block_tokens", "hash_bytes", "hash_algorithm", "hash_seed", "tenant", "salt")
    for name in alike:
        if any(getattr(spec, name) != getattr(first, name) for spec in specs):
            raise ConfigError(f"kvtier: this engine's ranks differ in {name}; run without kvtier")
    differing: dict[str, Any] = {
        name: BY_SHARD
        for name in ("kv_dtype", "layout", "attention", "kv_group")
        if any(getattr(spec, name) != getattr(first, name) for spec in specs)
    }
    extra = {
        name: value if all(spec.extra.get(name) == value for spec in specs) else BY_SHARD
        for name, value in first.extra.items()
    }
    return replace(
        first,
        **differing,
        # A slab has slots of one size: smaller shards leave the rest of theirs unused.
        shard_bytes=max(spec.shard_bytes for spec in specs),
        shard_count=len(specs),
        parallel=_order_of(shards),
        extra=extra,
    )


def _order_of(shards: Sequence[tuple[str, NamespaceSpec]]) -> str:
    """The shards one after the other: what each is, and how large; the rest as a digest."""
    lines = [[part, spec.canonical_json()] for part, spec in shards]
    digest = hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:32]
    sizes = "+".join(str(spec.shard_bytes) for _, spec in shards)
    return f"{sizes[: FACT_CHARS_MAX - 33]} {digest}"


def _merged(texts: Iterable[str]) -> str:
    """One text for all, which differs wherever one of them does."""
    known = list(texts)
    if len(set(known)) == 1:
        return known[0]
    return f"several {hashlib.sha256(json.dumps(known).encode()).hexdigest()}"
