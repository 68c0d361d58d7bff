from __future__ import annotations

import pytest

from kvtier.errors import BadRequest
from kvtier.sizing.fields import LAYER_COUNT_MAX
from kvtier.sizing.model import model_kv
from tests.unit.sizing.published import (
    DEEPSEEK_V3,
    DEEPSEEK_V3_2,
    GPT_OSS_120B,
    LLAMA_3_1_70B,
    OPT_13B,
)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        # Granite 4.0 H: 36 Mamba layers of 40.
        (
            {
                "model_type": "granitemoehybrid",
                "num_hidden_layers": 40,
                "layer_types": [*["mamba"] * 36, *["attention"] * 4],
            },
            "of 40 layers 36 mamba keep something else than KV",
        ),
        (
            {
                "model_type": "qwen3_next",
                "num_hidden_layers": 48,
                "layer_types": ["linear_attention"] * 36 + ["full_attention"] * 12,
            },
            "of 48 layers 36 linear_attention",
        ),
        ({"model_type": "qwen3_next"}, "state of fixed size"),
        ({"model_type": "jamba"}, "state of fixed size"),
        ({"model_type": "new", "hybrid_override_pattern": "M-M-M*-"}, "state of fixed size"),
        ({"model_type": "new", "mamba_d_state": 128}, "state of fixed size"),
        ({"model_type": "whisper", "is_encoder_decoder": True}, "encoder with a decoder"),
        ({"model_type": "bert"}, "is an encoder"),
        ({"model_type": "mllama", "cross_attention_layers": [3, 8]}, "cross-attention layers"),
        ({"model_type": "nemotron-nas", "block_configs": [{"attention": {}}]}, "different forms"),
        ({"model_type": "deepseek_v4", "compress_ratios": [4, 128]}, "compressed"),
        ({"model_type": "minicpm3", "kv_lora_rank": 256}, "has kv_lora_rank, but"),
        ({"num_kv_shared_layers": 10}, "not known in 'llama'"),
        ({"v_head_dim": 64}, "keys of 128 and values of 64"),
    ],
)
def test_what_is_no_plain_kv_is_refused_in_one_line(changes: dict[str, object], told: str) -> None:
    with pytest.raises(BadRequest) as refused:
        model_kv({**LLAMA_3_1_70B, **changes})
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_hybrid_type_with_attention_in_all_layers_is_sized() -> None:
    # Granite 4.0 Micro: 40 layers × 2 × 8 × (2560 / 40 = 64) × 2 B.
    micro = {
        "model_type": "granitemoehybrid",
        "dtype": "bfloat16",
        "hidden_size": 2560,
        "layer_types": ["attention"] * 40,
        "mamba_d_state": 256,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
    }
    assert model_kv(micro).token_bytes == 81_920


def test_forms_that_are_named_but_not_used_are_no_reason_to_refuse() -> None:
    unused = {"block_configs": None, "cross_attention_layers": [], "num_kv_shared_layers": 0}
    assert model_kv({**LLAMA_3_1_70B, **unused}).token_bytes == 327_680


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({**OPT_13B, "num_hidden_layers": "40"}, "num_hidden_layers is '40'"),
        ({**OPT_13B, "num_hidden_layers": 40.0}, "num_hidden_layers is 40.0"),
        ({**OPT_13B, "num_hidden_layers": True}, "num_hidden_layers is True"),
        ({**OPT_13B, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({**OPT_13B, "num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({**OPT_13B, "num_hidden_layers": LAYER_COUNT_MAX + 1}, "layers: at most"),
        ({**OPT_13B, "num_hidden_layers": 10**40}, "from 1 to"),
        ({**OPT_13B, "hidden_size": 5121}, "no multiple of 40"),
        ({**OPT_13B, "model_type": 5}, "model_type is 5"),
        ({**OPT_13B, "torch_dtype": "int4"}, "'int4'"),
        ({**OPT_13B, "torch_dtype": 16}, "torch_dtype is 16"),
        ({**LLAMA_3_1_70B, "num_key_value_heads": [8, 4]}, "num_key_value_heads is [8, 4]"),
        ({**LLAMA_3_1_70B, "num_key_value_heads": 7}, "64 attention heads cannot share 7"),
        ({**LLAMA_3_1_70B, "sliding_window": [4096]}, "sliding_window is [4096]"),
        ({**GPT_OSS_120B, "layer_types": ["full_attention"] * 35}, "contradicts itself"),
        ({**GPT_OSS_120B, "layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        ({**DEEPSEEK_V3, "kv_lora_rank": None}, "no kv_lora_rank"),
        ({**DEEPSEEK_V3_2, "index_topk_pattern": "FSSS"}, "index_topk_pattern is not known"),
        ({"text_config": {"num_hidden_layers": "x"}}, "text_config.num_hidden_layers is 'x'"),
        (
            {**OPT_13B, "quantization_config": {"kv_cache_quant_algo": "NVFP4"}},
            "another dtype than fp8",
        ),
    ],
)
def test_a_field_that_makes_no_sense_is_named(config: dict[str, object], told: str) -> None:
    with pytest.raises(BadRequest) as refused:
        model_kv(config)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_sparse_latents_of_another_size_are_not_sized_in_fp8() -> None:
    odd = {**DEEPSEEK_V3_2, "kv_lora_rank": 256}
    # (256 + 64) × 2 B + 132 B, in 61 layers.
    assert model_kv(odd).token_bytes == 47_092
    with pytest.raises(BadRequest, match="give --kv-dtype bf16"):
        model_kv(odd, kv_dtype="fp8")


def test_a_dtype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadRequest, match="give auto or one of fp8"):
        model_kv(OPT_13B, kv_dtype="int4")
