"""The same weights as a model of the `transformers` package: the judge of our arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.engine.model import LlamaModel


def to_transformers(model: LlamaModel) -> LlamaForCausalLM:
    """A LlamaForCausalLM that shares the tensors' values, not their layout."""
    shape = model.config
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.layer_count,
        num_attention_heads=shape.head_count,
        num_key_value_heads=shape.kv_head_count,
        head_dim=shape.head_size,
        max_position_embeddings=shape.context_tokens_max,
        rms_norm_eps=shape.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
        tie_word_embeddings=model.weights.output is model.weights.embedding,
    )
    twin = LlamaForCausalLM(config).eval().to(model.weights.embedding.dtype)
    twin.load_state_dict(_state_of(model))
    return twin


def assert_same_but_near_ties(
    twin: LlamaForCausalLM, prompt: Sequence[int], first: Sequence[int], second: Sequence[int]
) -> None:
    """Where they part, the two tokens' logits must be within rounding of each other."""
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        if one == other:
            continue
        context = torch.tensor([[*prompt, *first[:index]]])
        with torch.inference_mode():
            logits = twin(context, logits_to_keep=1).logits[0, -1]
        assert abs(logits[one] - logits[other]) < 1e-2
        return  # What follows answers different texts.


def _state_of(model: LlamaModel) -> dict[str, torch.Tensor]:
    weights, shape = model.weights, model.config
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.output,
    }
    query_size = shape.head_count * shape.head_size
    kv_size = shape.kv_head_count * shape.head_size
    for index, layer in enumerate(weights.layers):
        queries, keys, values = layer.qkv.split((query_size, kv_size, kv_size))
        gate, up = layer.gate_up.chunk(2)
        named = {
            "input_layernorm": layer.attention_norm,
            "post_attention_layernorm": layer.ffn_norm,
            "self_attn.q_proj": queries,
            "self_attn.k_proj": keys,
            "self_attn.v_proj": values,
            "self_attn.o_proj": layer.attention_out,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        state |= {f"model.layers.{index}.{name}.weight": value for name, value in named.items()}
    return state
