"""The namespace of an engine: from facts of its model, cache and parallelism.

Everything that changes the bytes of a block, or their meaning, must be in here: two engines that
differ in any of it never share a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvtier.namespace import NamespaceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine knows of itself. Counts are a shard's own where shards differ in them."""

    engine: str  # Such as "kvtier-engine/1"; with the version of its KV format.
    model: str
    weights: str  # See `weights_digest`; or a version that changes with every update.
    kv_dtype: str
    layout: str  # Order of the dimensions inside a block, outermost first.
    block_tokens: int
    layer_count: int
    kv_head_count: int
    head_dim: int
    element_bytes: int
    tensors_per_layer: int = 2  # Keys and values; 1 where one tensor holds a latent for both.
    shard_count: int = 1
    parallel: str = ""
    kv_group: str = ""
    attention: str = ""
    hash_algorithm: str = "sha256_cbor"
    hash_seed: str = ""
    hash_bytes: int = 32
    salt: str = ""
    rope: str = ""  # Digest or text of the position encoding: it is baked into the keys.
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def shard_bytes(self) -> int:
        elements = self.layer_count * self.tensors_per_layer * self.kv_head_count * self.head_dim
        return elements * self.block_tokens * self.element_bytes


def namespace_of(facts: EngineFacts) -> NamespaceSpec:
    """The namespace that these facts make. Raises BadRequest when one is out of bounds."""
    spec = NamespaceSpec(
        model=facts.model,
        weights=facts.weights,
        kv_dtype=facts.kv_dtype,
        layout=facts.layout,
        block_tokens=facts.block_tokens,
        shard_bytes=facts.shard_bytes,
        hash_bytes=facts.hash_bytes,
        shard_count=facts.shard_count,
        parallel=facts.parallel,
        kv_group=facts.kv_group,
        attention=facts.attention,
        hash_algorithm=facts.hash_algorithm,
        hash_seed=facts.hash_seed,
        salt=facts.salt,
        extra={
            **facts.extra,
            "engine": facts.engine,
            "layers": str(facts.layer_count),
            "kv_heads": str(facts.kv_head_count),
            "head_dim": str(facts.head_dim),
            "tensors_per_layer": str(facts.tensors_per_layer),
            "element_bytes": str(facts.element_bytes),
            "rope": facts.rope,
        },
    )
    spec.validate()
    return spec


def weights_digest(tensors: Iterable[tuple[str, str, bytes | memoryview]]) -> str:
    """Digest over (name, dtype and shape as text, bytes) of every tensor, in any order.

    Each tensor is hashed by itself (about 1.5 GB/s a core), so that loaders may stream.
    """
    parts = []
    for name, form, data in tensors:
        payload = hashlib.sha256(data).hexdigest()
        parts.append(f"{name}\0{form}\0{payload}\n")
    return "sha256:" + hashlib.sha256("".join(sorted(parts)).encode()).hexdigest()
