"""A Llama-architecture model as plain functions over plain tensors.

RMSNorm, rotary embedding (halves, as Hugging Face has it), grouped-query attention, SwiGLU, tied or
separate output embedding. A step is one flat run of tokens of all its requests; only attention
knows where one request ends.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.engine.attention import AttentionPlan, paged_attention, write_kv
from kvtier.engine.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; matrices are [out, in]."""

    attention_norm: Tensor
    qkv: Tensor  # Rows of all query heads, then key heads, then value heads.
    attention_out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor  # Rows of the gate, then of the up projection.
    down: Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All tensors of a model; `output` is `embedding` itself where they are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    output: Tensor


class LlamaModel:
    """Weights, shape and the forward pass; holds no state of any request."""

    def __init__(
        self, name: str, config: ModelConfig, weights: ModelWeights, digest: str | None = None
    ) -> None:
        self.name = name
        self.config = config
        self.weights = weights
        self._digest = digest
        dtype = weights.embedding.dtype
        self._cosines, self._sines = (table.to(dtype) for table in _rope_tables(config))

    @cached_property
    def weights_digest(self) -> str:
        """Names the weights in the namespace: KV of other weights must never be found."""
        if self._digest is not None:
            return self._digest
        hasher = hashlib.sha256(repr(self.config).encode())
        for tensor in _all_tensors(self.weights):
            hasher.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return f"sha256:{hasher.hexdigest()}"

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, kv_cache: Tensor, plan: AttentionPlan, logit_rows: Tensor
    ) -> Tensor:
        """Compute the step's tokens, write their KV, and return logits of `logit_rows` only.

        `kv_cache` is [device_blocks, layers, 2, block_tokens, kv_heads, head_size].
        """
        config, weights = self.config, self.weights
        hidden = functional.embedding(token_ids, weights.embedding)
        rope = (self._cosines[plan.positions, None], self._sines[plan.positions, None])
        for index, layer in enumerate(weights.layers):
            normed = _norm(hidden, layer.attention_norm, config)
            hidden += self._attend(normed, layer, kv_cache[:, index], plan, rope)
            normed = _norm(hidden, layer.ffn_norm, config)
            gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden += functional.linear(functional.silu(gate).mul_(up), layer.down)
        last = _norm(hidden[logit_rows], weights.final_norm, config)
        return functional.linear(last, weights.output).float()

    def _attend(
        self,
        normed: Tensor,
        layer: LayerWeights,
        kv: Tensor,
        plan: AttentionPlan,
        rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        config = self.config
        heads = functional.linear(normed, layer.qkv).view(len(normed), -1, config.head_size)
        rotated_count = config.head_count + config.kv_head_count
        rotated = _rotate(heads[:, :rotated_count], *rope)
        queries, keys = rotated[:, : config.head_count], rotated[:, config.head_count :]
        write_kv(kv, keys, heads[:, rotated_count:], plan)
        return functional.linear(paged_attention(queries, kv, plan).flatten(1), layer.attention_out)


def random_model(
    config: ModelConfig, seed: int, *, dtype: torch.dtype = torch.float32
) -> LlamaModel:
    """A model of any shape with weights drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) / math.sqrt(columns)).to(dtype)

    heads_size = config.head_count * config.head_size
    qkv_rows = heads_size + 2 * config.kv_head_count * config.head_size
    ones = torch.ones(config.hidden_size, dtype=dtype)
    layers = tuple(
        LayerWeights(
            attention_norm=ones,
            qkv=matrix(qkv_rows, config.hidden_size),
            attention_out=matrix(config.hidden_size, heads_size),
            ffn_norm=ones,
            gate_up=matrix(2 * config.ffn_size, config.hidden_size),
            down=matrix(config.hidden_size, config.ffn_size),
        )
        for _ in range(config.layer_count)
    )
    embedding = matrix(config.vocab_size, config.hidden_size)
    weights = ModelWeights(embedding, layers, ones, embedding)
    return LlamaModel(f"random-{seed}", config, weights)


def _norm(hidden: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    normed: Tensor = functional.rms_norm(hidden, (hidden.shape[-1],), weight, config.norm_epsilon)
    return normed


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate [tokens, heads, head_size]: element i with element i + head_size / 2."""
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.empty_like(heads)
    out_first, out_second = rotated.chunk(2, dim=-1)
    torch.mul(first, cosines, out=out_first).addcmul_(second, sines, value=-1)
    torch.mul(second, cosines, out=out_second).addcmul_(first, sines)
    return rotated


def _rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    positions = torch.arange(config.context_tokens_max, dtype=torch.float32)
    angles = torch.outer(positions, config.rope_base**-exponents)
    return angles.cos(), angles.sin()


def _all_tensors(weights: ModelWeights) -> list[Tensor]:
    tensors = [weights.embedding, weights.final_norm, weights.output]
    for layer in weights.layers:
        tensors += [layer.attention_norm, layer.qkv, layer.attention_out]
        tensors += [layer.ffn_norm, layer.gate_up, layer.down]
    return tensors
