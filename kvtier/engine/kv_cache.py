"""The engine's KV tensor, and the facts under which its blocks are known to kvtier.

Block-major, so that a block of all layers is one contiguous run of bytes:
[device_blocks, layers, 2 (keys, values), block_tokens, kv_heads, head_size].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.engine.config import EngineConfig
from kvtier.engine.model import LlamaModel
from kvtier.namespace import NamespaceSpec

LAYOUT = "layer,kv,token,head,element"
ATTENTION = "kvtier-reference"


def make_kv_cache(model: LlamaModel, config: EngineConfig) -> torch.Tensor:
    """Where the weights are. Zeroed, because attention multiplies masked values by zero and NaN
    would survive that."""
    shape = model.config
    return torch.zeros(
        config.device_block_count,
        shape.layer_count,
        2,
        config.block_tokens,
        shape.kv_head_count,
        shape.head_size,
        dtype=model.weights.embedding.dtype,
        device=model.weights.embedding.device,
    )


def columns_of(copies: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Sources and targets."""
    return [torch.tensor(column) for column in zip(*copies, strict=True)]


def copy_blocks(kv_cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Whole blocks, all layers; all sources are read before any target is written."""
    kv_cache[targets] = kv_cache[sources]


def block_bytes(model: LlamaModel, config: EngineConfig) -> int:
    """Size of one block of all layers."""
    shape = model.config
    element_count = shape.layer_count * 2 * shape.kv_head_count * shape.head_size
    return config.block_tokens * element_count * model.weights.embedding.dtype.itemsize


def namespace_spec(
    model: LlamaModel, config: EngineConfig, *, tenant: str = "", salt: str = ""
) -> NamespaceSpec:
    """Everything that must agree before another engine may use this one's KV."""
    shape = model.config
    return NamespaceSpec(
        model=model.name,
        weights=model.weights_digest,
        kv_dtype=str(model.weights.embedding.dtype).removeprefix("torch."),
        layout=LAYOUT,
        block_tokens=config.block_tokens,
        shard_bytes=block_bytes(model, config),
        attention=ATTENTION,
        hash_algorithm="sha256_cbor",
        hash_seed=config.hash_seed,
        tenant=tenant,
        salt=salt,
        extra={
            "layer_count": str(shape.layer_count),
            "kv_head_count": str(shape.kv_head_count),
            "head_size": str(shape.head_size),
            "rope_base": repr(shape.rope_base),
        },
    )
