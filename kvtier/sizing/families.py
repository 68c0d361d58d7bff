"""What is known of model types: defaults, layers that alternate, and what is no KV at all.

Published files leave fields out where they equal the defaults of the model's class in transformers;
those of a nested `text_config` nearly always do. A default here is that class's own
(`tests/unit/sizing/test_families.py` compares them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model type."""

    # By the field's name. No `num_key_value_heads`: as many as attention heads.
    defaults: Mapping[str, int] = field(default_factory=dict)
    # Where `layer_types` is absent: every n-th layer has full attention, the others a window.
    full_every: int | None = None
    # Its last layer has full attention, whatever the pattern says.
    is_last_full: bool = False
    # The window counts only where `use_sliding_window` is true, from layer `max_window_layers` on.
    is_window_optional: bool = False
    # One KV head for all, unless `multi_query` is false.
    is_multi_query: bool = False
    # vLLM keeps one latent a token instead of keys and values.
    is_latent: bool = False
    # The last `num_kv_shared_layers` layers read the KV of earlier ones and keep none.
    shares_kv: bool = False
    # Its layers with full attention have other heads, under `global_…` names.
    has_global_heads: bool = False


def _sizes(
    layers: int,
    heads: int,
    hidden: int,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> dict[str, int]:
    named = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": hidden,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    return {name: value for name, value in named.items() if value is not None}


_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_QWEN_VL = Family(
    defaults={**_sizes(80, 64, 8192, kv_heads=8), "sliding_window": 4096, "max_window_layers": 80},
    is_window_optional=True,
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(defaults=_sizes(32, 32, 4096)),
    "mistral": Family(defaults={**_sizes(32, 32, 4096, kv_heads=8), "sliding_window": 4096}),
    "ministral3": Family(defaults=_sizes(34, 32, 4096, kv_heads=8, head_dim=128)),
    "mixtral": Family(defaults=_sizes(32, 32, 4096, kv_heads=8)),
    "phi": Family(defaults=_sizes(24, 32, 2048)),
    "phi3": Family(defaults=_sizes(32, 32, 3072)),
    "opt": Family(defaults=_sizes(12, 12, 768)),
    "bloom": Family(defaults=_sizes(2, 8, 64)),
    "codegen": Family(defaults=_sizes(28, 16, 4096)),
    "mpt": Family(defaults=_sizes(24, 16, 2048)),
    "gpt2": Family(defaults=_sizes(12, 12, 768)),
    "gpt_neox": Family(defaults=_sizes(44, 64, 6144)),
    "gptj": Family(defaults=_sizes(28, 16, 4096)),
    "apertus": Family(defaults=_sizes(32, 32, 4096)),
    "cohere": Family(defaults=_sizes(40, 64, 8192)),
    "ernie4_5": Family(defaults=_sizes(18, 16, 1024, kv_heads=2, head_dim=128)),
    "glm": Family(defaults=_sizes(40, 32, 4096, kv_heads=2, head_dim=128)),
    "glm4": Family(defaults=_sizes(40, 32, 4096, kv_heads=2, head_dim=128)),
    "glm4_moe": Family(defaults=_sizes(46, 96, 4096, kv_heads=8)),
    "granite": Family(defaults=_sizes(32, 32, 4096)),
    "granitemoe": Family(defaults=_sizes(32, 32, 4096)),
    "minimax_m2": Family(defaults=_sizes(62, 48, 3072, kv_heads=8, head_dim=128)),
    "nemotron": Family(defaults=_sizes(32, 48, 6144, head_dim=128)),
    "olmo2": Family(defaults=_sizes(32, 32, 4096)),
    "phimoe": Family(defaults=_sizes(32, 32, 4096, kv_heads=8)),
    "seed_oss": Family(defaults=_sizes(64, 80, 4096, kv_heads=8, head_dim=128)),
    "smollm3": Family(defaults=_sizes(36, 16, 2048, kv_heads=4)),
    "stablelm": Family(defaults=_sizes(32, 32, 2560, kv_heads=32)),
    "starcoder2": Family(defaults=_sizes(30, 24, 3072, kv_heads=2)),
    "gpt_bigcode": Family(defaults=_sizes(12, 12, 768), is_multi_query=True),
    "falcon": Family(defaults=_sizes(32, 71, 4544), is_multi_query=True),
    "qwen2": Family(
        defaults={
            **_sizes(32, 32, 4096, kv_heads=32),
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        is_window_optional=True,
    ),
    # The first two are files of a time before `text_config`.
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "qwen2_vl_text": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen2_moe": Family(
        defaults={
            **_sizes(24, 16, 2048, kv_heads=16),
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        is_window_optional=True,
    ),
    "qwen3": Family(
        defaults={
            **_sizes(32, 32, 4096, kv_heads=32, head_dim=128),
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        is_window_optional=True,
    ),
    "qwen3_moe": Family(
        defaults={**_sizes(24, 32, 2048, kv_heads=4), "sliding_window": 4096},
        is_window_optional=True,
    ),
    "qwen3_vl_text": Family(defaults=_sizes(32, 32, 4096, kv_heads=32, head_dim=128)),
    "qwen3_vl_moe_text": Family(defaults=_sizes(24, 16, 2048, kv_heads=16, head_dim=128)),
    "gemma": Family(defaults=_sizes(28, 16, 3072, kv_heads=16, head_dim=256)),
    "gemma2": Family(
        defaults={**_sizes(26, 8, 2304, kv_heads=4, head_dim=256), "sliding_window": 4096},
        full_every=2,
    ),
    "gemma3_text": Family(
        defaults={**_sizes(26, 8, 2304, kv_heads=4, head_dim=256), "sliding_window": 4096},
        full_every=6,
    ),
    "gemma3n_text": Family(
        defaults={
            **_sizes(35, 8, 2048, kv_heads=2, head_dim=256),
            "sliding_window": 512,
            "num_kv_shared_layers": 15,
        },
        full_every=5,
        shares_kv=True,
    ),
    "gemma4_text": Family(
        defaults={
            **_sizes(30, 8, 2304, kv_heads=4, head_dim=256),
            "sliding_window": 512,
            "num_kv_shared_layers": 0,
            "global_head_dim": 512,
        },
        full_every=6,
        is_last_full=True,
        shares_kv=True,
        has_global_heads=True,
    ),
    "gpt_oss": Family(
        defaults={**_sizes(36, 64, 2880, kv_heads=8, head_dim=64), "sliding_window": 128},
        full_every=2,
    ),
    "cohere2": Family(defaults={**_sizes(40, 64, 8192), "sliding_window": 4096}, full_every=4),
    "olmo3": Family(defaults={**_sizes(32, 32, 4096), "sliding_window": 4096}, full_every=4),
    "llama4_text": Family(
        defaults={
            **_sizes(48, 40, 5120, kv_heads=8, head_dim=128),
            "attention_chunk_size": 8192,
        },
        full_every=4,
    ),
    "deepseek_v2": Family(defaults={**_sizes(32, 32, 4096), **_LATENT}, is_latent=True),
    "deepseek_v3": Family(defaults={**_sizes(61, 128, 7168), **_LATENT}, is_latent=True),
    "deepseek_v32": Family(
        defaults={**_sizes(61, 128, 7168), **_LATENT, "index_head_dim": 128, "index_topk": 2048},
        is_latent=True,
    ),
    # Not in transformers: its files leave nothing out.
    "kimi_k2": Family(is_latent=True),
    "glm4_moe_lite": Family(defaults={**_sizes(47, 20, 2048), **_LATENT}, is_latent=True),
    "glm_moe_dsa": Family(
        defaults={**_sizes(78, 64, 6144), **_LATENT, "index_head_dim": 128, "index_topk": 2048},
        is_latent=True,
    ),
}

# Their layers, or some of them, keep a state of a fixed size instead of KV for each token.
RECURRENT_TYPES = frozenset(
    {
        *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"),
        *("kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax"),
        *("minimax_text_01", "nemotron_h", "olmo_hybrid", "plamo2", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm"),
        *("zamba", "zamba2"),
    }
)
# The same is told by these fields, whatever the type is called.
RECURRENT_FIELDS = (
    *("attn_layer_period", "attn_type_list", "conv_L_cache", "full_attn_idxs"),
    *("hybrid_override_pattern", "layers_block_type", "linear_attn_config"),
    *("linear_num_key_heads", "mamba_d_state", "mamba_num_heads", "ssm_state_size"),
)

# They read a text as a whole and keep nothing of it.
ENCODER_TYPES = frozenset(
    {
        *("albert", "bert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert"),
        *("mpnet", "nomic_bert", "roberta", "xlm-roberta"),
    }
)

# Layers that differ in ways this package does not know.
UNKNOWN_FORMS: Mapping[str, str] = {
    "block_configs": "layers of different forms",
    "compress_ratios": "KV that is compressed along the tokens",
    "cross_attention_layers": "cross-attention layers",
    "hybrid_layer_pattern": "layers with different KV heads",
    "num_key_value_heads_per_layer": "layers with different KV heads",
    "per_layer_config": "layers of different forms",
    "swa_num_key_value_heads": "layers with different KV heads",
}
