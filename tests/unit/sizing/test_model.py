"""KV of published models, worked out by hand.

With K and V, a token takes layers × 2 × KV heads × values a head × bytes a value.
"""

from __future__ import annotations

import pytest

from kvtier.errors import BadRequest
from kvtier.sizing.groups import AttentionKind, KvGroup
from kvtier.sizing.model import model_kv
from tests.unit.sizing.published import (
    DEEPSEEK_V3,
    DEEPSEEK_V3_2,
    GEMMA_2_9B,
    GEMMA_3_4B,
    GEMMA_3_27B,
    GPT_OSS_120B,
    LLAMA_3_1_70B,
    MISTRAL_7B_V0_1,
    OPT_13B,
)


def groups_of(config: dict[str, object]) -> dict[str, tuple[int, int, int, int | None]]:
    """kind -> (layers, KV heads, values a head, window)."""
    return {
        group.kind.value: (
            group.layer_count,
            group.kv_head_count,
            group.head_dim,
            group.window_tokens,
        )
        for group in model_kv(config).groups
    }


def test_opt_13b_takes_819200_bytes_a_token() -> None:
    # No KV heads in its file: all 40 heads. 5120 / 40 = 128 values a head.
    # 40 layers × 2 × 40 heads × 128 × 2 B = 40 × 20,480 = 819,200.
    model = model_kv(OPT_13B)
    assert model.token_bytes == 819_200
    assert model.groups == (
        KvGroup(
            kind=AttentionKind.FULL, layer_count=40, kv_head_count=40, head_dim=128, head_bytes=512
        ),
    )
    assert model.notes == ()


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        # 80 layers × 2 × 8 × (8192 / 64 = 128) × 2 B.
        pytest.param(LLAMA_3_1_70B, 327_680, id="Llama 3.1 70B: grouped heads"),
        # Saved before grouped heads: 32 layers × 2 × 32 × (4096 / 32 = 128) × 2 B.
        pytest.param(
            {
                "model_type": "llama",
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_hidden_layers": 32,
                "torch_dtype": "float16",
            },
            524_288,
            id="Llama 1 7B: no num_key_value_heads",
        ),
        # 28 layers × 2 × 4 × (3584 / 28 = 128) × 2 B.
        pytest.param(
            {
                "model_type": "qwen2",
                "hidden_size": 3584,
                "max_window_layers": 28,
                "num_attention_heads": 28,
                "num_hidden_layers": 28,
                "num_key_value_heads": 4,
                "sliding_window": 131072,
                "torch_dtype": "bfloat16",
                "use_sliding_window": False,
            },
            57_344,
            id="Qwen2.5 7B",
        ),
        # head_dim 128 is given; 5120 / 64 would be 80. 64 layers × 2 × 8 × 128 × 2 B.
        pytest.param(
            {
                "model_type": "qwen3",
                "head_dim": 128,
                "hidden_size": 5120,
                "num_attention_heads": 64,
                "num_hidden_layers": 64,
                "num_key_value_heads": 8,
                "torch_dtype": "bfloat16",
            },
            262_144,
            id="Qwen3 32B: head_dim is not hidden_size / heads",
        ),
        # head_dim 128 is given; 5120 / 32 would be 160. 40 layers × 2 × 8 × 128 × 2 B.
        pytest.param(
            {
                "model_type": "mistral",
                "head_dim": 128,
                "hidden_size": 5120,
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "sliding_window": None,
                "torch_dtype": "bfloat16",
            },
            163_840,
            id="Mistral NeMo: no window",
        ),
        # One KV head of 4544 / 71 = 64, whatever num_kv_heads says: 32 layers × 2 × 1 × 64 × 2 B.
        pytest.param(
            {
                "model_type": "falcon",
                "hidden_size": 4544,
                "multi_query": True,
                "new_decoder_architecture": False,
                "num_attention_heads": 71,
                "num_hidden_layers": 32,
                "num_kv_heads": 71,
                "torch_dtype": "bfloat16",
            },
            8_192,
            id="Falcon 7B: one KV head",
        ),
        # The newer form has 8 KV heads of 8192 / 128 = 64: 60 layers × 2 × 8 × 64 × 2 B.
        pytest.param(
            {
                "model_type": "falcon",
                "hidden_size": 8192,
                "multi_query": True,
                "new_decoder_architecture": True,
                "num_attention_heads": 128,
                "num_hidden_layers": 60,
                "num_kv_heads": 8,
                "torch_dtype": "bfloat16",
            },
            122_880,
            id="Falcon 40B: multi_query means nothing",
        ),
        # Names of its own, multi-query by default: 40 layers × 2 × 1 × (6144 / 48 = 128) × 2 B.
        pytest.param(
            {
                "model_type": "gpt_bigcode",
                "n_embd": 6144,
                "n_head": 48,
                "n_layer": 40,
                "torch_dtype": "float16",
            },
            20_480,
            id="StarCoder",
        ),
        # Its text_config says only that it is a Llama: 32 layers × 2 × 32 × 128 × 2 B.
        pytest.param(
            {
                "model_type": "llava",
                "text_config": {"model_type": "llama", "max_position_embeddings": 4096},
                "torch_dtype": "float16",
                "vision_config": {"hidden_size": 1024, "num_hidden_layers": 24},
            },
            524_288,
            id="LLaVA 1.5 7B: a text_config of defaults",
        ),
        # Two levels down: 28 layers × 2 × 4 × (3584 / 28 = 128) × 2 B.
        pytest.param(
            {
                "model_type": "qwen2_5_omni",
                "thinker_config": {
                    "model_type": "qwen2_5_omni_thinker",
                    "text_config": {
                        "model_type": "qwen2_5_omni_text",
                        "hidden_size": 3584,
                        "num_attention_heads": 28,
                        "num_hidden_layers": 28,
                        "num_key_value_heads": 4,
                        "use_sliding_window": False,
                        "sliding_window": 32768,
                    },
                },
                "torch_dtype": "bfloat16",
            },
            57_344,
            id="Qwen2.5 Omni 7B: nested twice",
        ),
    ],
)
def test_a_token_takes_its_keys_and_values(config: dict[str, object], token_bytes: int) -> None:
    model = model_kv(config)
    assert model.token_bytes == token_bytes
    assert [group.kind for group in model.groups] == [AttentionKind.FULL]


def test_a_window_in_all_layers_is_told() -> None:
    # 32 layers × 2 × 8 × 128 × 2 B.
    model = model_kv(MISTRAL_7B_V0_1)
    assert model.token_bytes == 131_072
    assert groups_of(MISTRAL_7B_V0_1) == {"window": (32, 8, 128, 4096)}


@pytest.mark.parametrize(
    ("config", "groups", "token_bytes"),
    [
        # Every second layer is full. Each layer 2 × 8 × 256 × 2 B = 8,192; × 42.
        pytest.param(
            GEMMA_2_9B,
            {"full": (21, 8, 256, None), "window": (21, 8, 256, 4096)},
            344_064,
            id="Gemma 2 9B",
        ),
        # Every sixth of 62 is full: 10. Each layer 2 × 16 × 128 × 2 B = 8,192; × 62.
        pytest.param(
            GEMMA_3_27B,
            {"full": (10, 16, 128, None), "window": (52, 16, 128, 1024)},
            507_904,
            id="Gemma 3 27B",
        ),
        # Every sixth of 34 is full: 5. Each layer 2 × 4 × 256 × 2 B = 4,096; × 34.
        pytest.param(
            GEMMA_3_4B,
            {"full": (5, 4, 256, None), "window": (29, 4, 256, 1024)},
            139_264,
            id="Gemma 3 4B",
        ),
        # layer_types say it. Each layer 2 × 8 × 64 × 2 B = 2,048; × 36.
        pytest.param(
            GPT_OSS_120B,
            {"full": (18, 8, 64, None), "window": (18, 8, 64, 128)},
            73_728,
            id="gpt-oss 120B",
        ),
        # Defaults alone: 35 layers of which the last 15 share; of the first 20 every fifth is full.
        # Each layer 2 × 2 × 256 × 2 B = 2,048; × 20.
        pytest.param(
            {
                "model_type": "gemma3n",
                "dtype": "bfloat16",
                "text_config": {"model_type": "gemma3n_text"},
            },
            {"full": (4, 2, 256, None), "window": (16, 2, 256, 512)},
            40_960,
            id="Gemma 3n: layers that share KV keep none",
        ),
        # 30 layers, every sixth full with heads of 512, KV heads as given for K = V:
        # 5 × 2 × 2 × 512 × 2 B = 20,480; 25 × 2 × 8 × 256 × 2 B = 204,800.
        pytest.param(
            {
                "model_type": "gemma4",
                "dtype": "bfloat16",
                "text_config": {
                    "model_type": "gemma4_text",
                    "attention_k_eq_v": True,
                    "num_attention_heads": 16,
                    "num_global_key_value_heads": 2,
                    "num_hidden_layers": 30,
                    "num_key_value_heads": 8,
                    "sliding_window": 1024,
                },
            },
            {"full": (5, 2, 512, None), "window": (25, 8, 256, 1024)},
            225_280,
            id="Gemma 4: heads of two sizes",
        ),
        # Every fourth layer is full, the others read 8,192 tokens. 48 × 2 × 8 × 128 × 2 B.
        pytest.param(
            {
                "model_type": "llama4",
                "text_config": {
                    "model_type": "llama4_text",
                    "attention_chunk_size": 8192,
                    "head_dim": 128,
                    "no_rope_layers": [],
                    "num_attention_heads": 40,
                    "num_hidden_layers": 48,
                    "num_key_value_heads": 8,
                },
                "torch_dtype": "bfloat16",
            },
            {"full": (12, 8, 128, None), "window": (36, 8, 128, 8192)},
            196_608,
            id="Llama 4 Scout",
        ),
    ],
)
def test_layers_with_full_attention_and_with_a_window_are_told_apart(
    config: dict[str, object], groups: dict[str, object], token_bytes: int
) -> None:
    assert groups_of(config) == groups
    assert model_kv(config).token_bytes == token_bytes


def test_qwen_has_a_window_only_if_it_is_switched_on_and_only_in_upper_layers() -> None:
    config = {
        **LLAMA_3_1_70B,
        "model_type": "qwen2",
        "max_window_layers": 70,
        "sliding_window": 4096,
    }
    assert groups_of(config) == {"full": (80, 8, 128, None)}
    assert groups_of({**config, "use_sliding_window": False}) == {"full": (80, 8, 128, None)}
    assert groups_of({**config, "use_sliding_window": True}) == {
        "full": (70, 8, 128, None),
        "window": (10, 8, 128, 4096),
    }


@pytest.mark.parametrize("window", [None, 0])
def test_a_window_of_nothing_is_no_window(window: int | None) -> None:
    assert groups_of({**MISTRAL_7B_V0_1, "sliding_window": window}) == {"full": (32, 8, 128, None)}


def test_an_absent_field_has_the_default_of_its_class_and_null_has_none() -> None:
    absent = {
        name: value
        for name, value in MISTRAL_7B_V0_1.items()
        if name not in ("num_key_value_heads", "sliding_window")
    }
    assert groups_of(absent) == {"window": (32, 8, 128, 4096)}
    (note,) = model_kv(absent).notes
    assert note == (
        "not in config.json, taken as transformers does for 'mistral': sliding_window 4096, "
        "num_key_value_heads 8"
    )
    null = {**absent, "num_key_value_heads": None, "sliding_window": None}
    assert groups_of(null) == {"full": (32, 32, 128, None)}


def test_deepseek_keeps_one_latent_a_layer() -> None:
    # 61 layers × (512 + 64) × 2 B: neither heads nor keys beside values count, and the layer for
    # speculation is not among them.
    assert groups_of(DEEPSEEK_V3) == {"latent": (61, 1, 576, None)}
    assert model_kv(DEEPSEEK_V3).token_bytes == 70_272
    assert model_kv(DEEPSEEK_V3, kv_dtype="fp8").token_bytes == 35_136


def test_sparse_attention_keeps_keys_for_choosing_as_well() -> None:
    # Each layer: (512 + 64) × 2 B = 1,152, and 128 B with one scale of 4 B = 132; × 61.
    assert groups_of(DEEPSEEK_V3_2) == {"latent": (61, 1, 576, None), "index": (61, 1, 128, None)}
    assert model_kv(DEEPSEEK_V3_2).token_bytes == 78_324
    # In fp8 the latent is packed: 512 + 4 × 4 + 64 × 2 = 656 B; (656 + 132) × 61.
    assert model_kv(DEEPSEEK_V3_2, kv_dtype="fp8").token_bytes == 48_068


def test_layers_that_reuse_a_choice_of_tokens_keep_no_keys_for_it() -> None:
    # The layers 0, 1, 5, 9, … 57 choose: 1 + 15. Latents are in all 61.
    shared = {**DEEPSEEK_V3_2, "index_topk_freq": 4, "index_skip_topk_offset": 2}
    assert groups_of(shared) == {"latent": (61, 1, 576, None), "index": (16, 1, 128, None)}
    # 61 × 1,152 + 16 × 132.
    assert model_kv(shared).token_bytes == 72_384


@pytest.mark.parametrize(
    ("changes", "kv_dtype", "value_bytes"),
    [
        ({}, "auto", 2),
        ({}, "fp8", 1),
        ({}, "fp8_e5m2", 1),
        ({}, "bf16", 2),
        ({}, "fp32", 4),
        ({"torch_dtype": None, "dtype": "bfloat16"}, "auto", 2),
        ({"torch_dtype": "torch.bfloat16"}, "auto", 2),
        # vLLM serves these in 16 bits, and the notes say so.
        ({"torch_dtype": "float32"}, "auto", 2),
        ({"torch_dtype": None}, "auto", 2),
        # Checkpoints that come with scales for KV in fp8.
        (
            {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}},
            "auto",
            1,
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
                }
            },
            "auto",
            1,
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "auto", 2),
        (
            {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}},
            "bf16",
            2,
        ),
    ],
)
def test_the_dtype_is_the_one_asked_for_or_what_vllm_takes(
    changes: dict[str, object], kv_dtype: str, value_bytes: int
) -> None:
    model = model_kv({**OPT_13B, **changes}, kv_dtype=kv_dtype)
    assert model.token_bytes == 409_600 * value_bytes


@pytest.mark.parametrize("dtype", ["float32", None])
def test_a_dtype_that_is_assumed_is_told(dtype: str | None) -> None:
    (note,) = model_kv({**OPT_13B, "torch_dtype": dtype}).notes
    assert "16 bits" in note
    assert "--kv-dtype" in note


def test_a_type_that_is_not_known_is_sized_by_its_fields_and_told() -> None:
    model = model_kv({**LLAMA_3_1_70B, "model_type": "brand_new"})
    assert model.token_bytes == 327_680
    assert "'brand_new' is sized by its fields alone" in model.notes[0]
    bare = {name: value for name, value in OPT_13B.items() if name != "model_type"}
    assert "all 40 attention heads are counted" in model_kv(bare).notes[1]


def test_a_name_from_the_file_cannot_write_lines_of_its_own() -> None:
    assert model_kv({**LLAMA_3_1_70B, "model_type": "a\nb\x1b[2J"}).model_type == "a?b?[2J"


def test_without_its_sizes_a_known_type_has_those_of_its_class_and_others_are_refused() -> None:
    assert model_kv({"model_type": "opt", "dtype": "float16"}).token_bytes == 12 * 2 * 768 * 2
    with pytest.raises(BadRequest, match="no num_hidden_layers"):
        model_kv({"model_type": "brand_new"})
