"""Checkpoints for real vLLM, written here: nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 512
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<pad>"]


def write_tiny_llama(folder: Path, *, seed: int = 1234) -> None:
    """1.2 MB; equal seeds give equal weights. Token N is the word "wN"."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        # With the usual 0.02 a random model repeats one token, whatever its KV holds.
        initializer_range=0.2,
    )
    _write(LlamaForCausalLM(config), folder)


def write_tiny_gemma(folder: Path, *, window: int = 96, seed: int = 1234) -> None:
    """A hybrid: two layers see everything, two the last `window` tokens, in turn."""
    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=8192,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention"] * 2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        initializer_range=0.2,
    )
    model = Gemma3ForCausalLM(config)
    # They are the output's as well: as large as usual, each token would be followed by itself.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.01)
    _write(model, folder)


def write_tiny_deepseek(folder: Path, *, seed: int = 1234) -> None:
    """Latent attention (MLA): one latent a token for all heads."""
    torch.manual_seed(seed)
    config = DeepseekV2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=3,  # No experts.
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        initializer_range=0.2,
    )
    _write(DeepseekV2ForCausalLM(config), folder)


def _write(model: Any, folder: Path) -> None:
    model = model.to(torch.bfloat16)
    model.generation_config.do_sample = False
    model.save_pretrained(folder, safe_serialization=True)
    write_word_tokenizer(folder)


def write_word_tokenizer(folder: Path) -> None:
    words = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    words |= {f"w{index}": index for index in range(len(SPECIAL_TOKENS), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=8192,
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}",
    ).save_pretrained(folder)


def write_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct as bfloat16 safetensors. Its tokens are given as ids in tests."""
    from kvtier.engine.files.smollm2 import load_smollm2

    ours, _ = load_smollm2(dtype=torch.float32)
    shape, weights = ours.config, ours.weights
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
        rope_theta=shape.rope_base,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    kv_size = shape.kv_head_count * shape.head_size
    sizes = [shape.head_count * shape.head_size, kv_size, kv_size]
    tensors = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
    }
    for index, layer in enumerate(weights.layers):
        place = f"model.layers.{index}"
        query, key, value = layer.qkv.split(sizes)
        gate, up = layer.gate_up.chunk(2)
        tensors |= {
            f"{place}.self_attn.q_proj.weight": query,
            f"{place}.self_attn.k_proj.weight": key,
            f"{place}.self_attn.v_proj.weight": value,
            f"{place}.self_attn.o_proj.weight": layer.attention_out,
            f"{place}.mlp.gate_proj.weight": gate,
            f"{place}.mlp.up_proj.weight": up,
            f"{place}.mlp.down_proj.weight": layer.down,
            f"{place}.input_layernorm.weight": layer.attention_norm,
            f"{place}.post_attention_layernorm.weight": layer.ffn_norm,
        }
    model = LlamaForCausalLM(config)
    left_out = model.load_state_dict(tensors, strict=False)
    assert set(left_out.missing_keys) <= {"lm_head.weight"}, left_out
    assert not left_out.unexpected_keys, left_out
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
