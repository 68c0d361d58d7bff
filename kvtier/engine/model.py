"""A Llama-architecture model as plain functions over plain tensors.

RMSNorm, rotary embedding (halves, as Hugging Face has it), grouped-query attention, SwiGLU, tied or
separate output embedding. A step is one flat run of tokens of all its requests; only attention
knows where one request ends.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.engine.attention import Attention, AttentionPlan, TorchAttention
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
        # Angles are computed on the host: all devices have the same.
        self.cosines, self.sines = (
            table.to(weights.embedding.device, weights.embedding.dtype)
            for table in _rope_tables(config)
        )

    @cached_property
    def weights_digest(self) -> str:
        """Names the weights in the namespace: KV of other weights must never be found."""
        if self._digest is not None:
            return self._digest
        hasher = hashlib.sha256(repr(self.config).encode())
        for tensor in _all_tensors(self.weights):
            hasher.update(tensor.contiguous().view(torch.uint8).cpu().numpy().data)
        return f"sha256:{hasher.hexdigest()}"

    def forward(
        self, token_ids: Tensor, kv_cache: Tensor, plan: AttentionPlan, logit_rows: Tensor
    ) -> Tensor:
        """Compute the step's tokens, write their KV, and return logits of `logit_rows` only.

        `kv_cache` is [device_blocks, layers, 2, block_tokens, kv_heads, head_size].
        """
        forward = Forward(self, TorchAttention(kv_cache), plan, token_ids, logit_rows)
        forward.begin()
        for layer in range(self.config.layer_count):
            forward.run_layer(layer)
        forward.finish()
        return forward.logits


class Forward:
    """One step's way through a model, in parts that are run once each: `begin`, every layer in
    order, `finish`."""

    def __init__(
        self,
        model: LlamaModel,
        attention: Attention,
        plan: AttentionPlan,
        token_ids: Tensor,
        logit_rows: Tensor,
    ) -> None:
        self._model = model
        self._attention = attention
        self._plan = plan
        self._token_ids = token_ids
        self._logit_rows = logit_rows
        self.logits = self.likeliest = torch.empty(0)  # Of `logit_rows`, by `finish`.

    @torch.inference_mode()
    def begin(self) -> None:
        model, positions = self._model, self._plan.positions
        self._hidden = functional.embedding(self._token_ids, model.weights.embedding)
        self._rope = (model.cosines[positions, None], model.sines[positions, None])

    @torch.inference_mode()
    def run_layer(self, index: int) -> None:
        """Write the layer's KV of the step's tokens, and compute what it does to them."""
        config, layer = self._model.config, self._model.weights.layers[index]
        hidden = self._hidden
        hidden += self._attend(index, _norm(hidden, layer.attention_norm, config), layer)
        normed = _norm(hidden, layer.ffn_norm, config)
        gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
        hidden += functional.linear(functional.silu(gate).mul_(up), layer.down)

    @torch.inference_mode()
    def finish(self) -> None:
        weights = self._model.weights
        last = _norm(self._hidden[self._logit_rows], weights.final_norm, self._model.config)
        self.logits = functional.linear(last, weights.output).float()
        self.likeliest = self.logits.argmax(dim=-1)

    def _attend(self, index: int, normed: Tensor, layer: LayerWeights) -> Tensor:
        config, plan = self._model.config, self._plan
        heads = functional.linear(normed, layer.qkv).view(len(normed), -1, config.head_size)
        rotated_count = config.head_count + config.kv_head_count
        rotated = _rotate(heads[:, :rotated_count], *self._rope)
        queries, keys = rotated[:, : config.head_count], rotated[:, config.head_count :]
        self._attention.write(index, keys, heads[:, rotated_count:], plan)
        attended = self._attention.attend(index, queries, plan)
        return functional.linear(attended.flatten(1), layer.attention_out)


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
