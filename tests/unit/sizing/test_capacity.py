from __future__ import annotations

import pytest

from kvtier.errors import BadRequest
from kvtier.sizing.capacity import LINKS, BlockSize, Link
from kvtier.sizing.model import model_kv
from tests.unit.sizing.published import (
    DEEPSEEK_V3,
    GEMMA_3_27B,
    LLAMA_3_1_70B,
    MISTRAL_7B_V0_1,
    OPT_13B,
)

GIB = 1 << 30


def test_a_block_is_its_tokens() -> None:
    # 16 × 819,200 B; a whole number of pages, so that a slot is no larger.
    size = BlockSize(model_kv(OPT_13B))
    assert size.block_bytes == size.slot_bytes == 13_107_200
    # 2^30 × 64 / 13,107,200 = 5,242.88.
    assert size.block_count(64 * GIB) == 5_242


def test_ranks_split_heads_evenly() -> None:
    # 8 KV heads on 8 ranks: 80 layers × 2 × 1 × 128 × 2 B = 40,960 on each.
    size = BlockSize(model_kv(LLAMA_3_1_70B), tp=8)
    assert size.shard_count == 8
    assert size.shard_token_bytes == 40_960
    assert size.held_token_bytes == 327_680
    assert not size.notes()


def test_more_ranks_than_heads_hold_copies_and_it_is_told() -> None:
    # 8 KV heads on 32 ranks: still one head on each, 32 × 40,960 B in all.
    size = BlockSize(model_kv(LLAMA_3_1_70B), tp=32)
    assert size.shard_token_bytes == 40_960
    assert size.held_token_bytes == 1_310_720
    assert "32 ranks share 8 KV heads" in size.notes()[0]


def test_latents_are_held_once_however_many_ranks() -> None:
    # 61 × 576 × 2 B on every rank and, once, in kvtier.
    size = BlockSize(model_kv(DEEPSEEK_V3), tp=16)
    assert size.shard_count == 1
    assert size.shard_token_bytes == size.held_token_bytes == 70_272
    (note,) = size.notes()
    assert "kvtier keeps one copy" in note


@pytest.mark.parametrize(
    ("config", "tp", "told"),
    [
        (LLAMA_3_1_70B, 3, "64 attention heads cannot be split among 3 ranks"),
        (
            {**LLAMA_3_1_70B, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128},
            12,
            "give a divisor or a multiple of 8",
        ),
        (LLAMA_3_1_70B, 0, "give 1 to 128"),
        (LLAMA_3_1_70B, 256, "give 1 to 128"),
    ],
)
def test_ranks_that_vllm_would_refuse_are_refused(
    config: dict[str, object], tp: int, told: str
) -> None:
    with pytest.raises(BadRequest, match=told):
        BlockSize(model_kv(config), tp=tp)


@pytest.mark.parametrize("block_tokens", [0, 65_537])
def test_blocks_that_the_daemon_would_refuse_are_refused(block_tokens: int) -> None:
    with pytest.raises(BadRequest, match="--block-tokens"):
        BlockSize(model_kv(OPT_13B), block_tokens=block_tokens)


def test_a_shard_above_the_daemons_limit_is_refused() -> None:
    # 2^30 / 819,200 = 1,310.72 tokens.
    assert BlockSize(model_kv(OPT_13B), block_tokens=1310).shard_bytes <= GIB
    with pytest.raises(BadRequest, match="give fewer --block-tokens"):
        BlockSize(model_kv(OPT_13B), block_tokens=1311)


def test_only_whole_blocks_of_a_prompt_are_kept() -> None:
    size = BlockSize(model_kv(OPT_13B), block_tokens=100)
    assert size.prompt(1024).slot_bytes == 10 * size.slot_bytes
    assert size.prompt(99).slot_bytes == 0


def test_layers_with_a_window_need_only_the_blocks_that_are_read_again() -> None:
    # Full: 81,920 B a token × 16 = 1,310,720; window: 425,984 × 16 = 6,815,744.
    size = BlockSize(model_kv(GEMMA_3_27B))
    prompt = size.prompt(8192)
    assert prompt.slot_bytes == 512 * (1_310_720 + 6_815_744)
    # The token behind the prompt reads 1,023 before it: in 64 blocks.
    assert prompt.window_slot_bytes == 512 * 1_310_720 + 64 * 6_815_744
    # A prompt no longer than the window needs all of it.
    short = size.prompt(1024)
    assert short.window_slot_bytes == short.slot_bytes
    # All layers have a window: what a prompt needs is the same from there on.
    mistral = BlockSize(model_kv(MISTRAL_7B_V0_1))
    assert mistral.prompt(131_072).window_slot_bytes == mistral.prompt(4096).slot_bytes
    assert "the last 4,096 tokens" in mistral.notes()[0]


def test_each_shard_is_padded_to_what_a_disk_reads() -> None:
    # 12 layers × 2 × 12 × 64 × 2 B = 36,864 a token; half on each of two ranks: 18,432 = 4.5 pages.
    model = model_kv({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768})
    size = BlockSize(model, tp=2, block_tokens=1)
    assert size.block_bytes == 36_864
    assert size.slot_bytes == 2 * 5 * 4096
    assert any("take" in note and "40,960" in note for note in size.notes())


def test_what_does_not_fit_an_nvme_segment_is_told() -> None:
    # 256 MiB / 819,200 B = 327.68 tokens.
    assert any(
        "stays in memory" in n for n in BlockSize(model_kv(OPT_13B), block_tokens=328).notes()
    )
    # Two blocks of 110 tokens take 180,224,000 of 268,435,456 bytes: a third is lost.
    notes = BlockSize(model_kv(OPT_13B), block_tokens=110).notes()
    assert any("holds 2 whole slots: on NVMe count 33 % fewer" in note for note in notes)


def test_a_short_model_is_told_where_long_prompts_are_shown() -> None:
    assert any("up to 2,048 tokens" in note for note in BlockSize(model_kv(OPT_13B)).notes())


def test_each_rank_moves_its_own_shard_over_its_own_link() -> None:
    size = BlockSize(model_kv(LLAMA_3_1_70B), tp=8)
    own = Link("GPU", 655_360.0, is_per_rank=True)
    shared = Link("NVMe", 655_360.0, is_per_rank=False)
    # 16 tokens × 40,960 B a rank, 16 × 327,680 B in all.
    assert size.link_seconds(own) == 1.0
    assert size.link_seconds(shared) == 8.0
    assert all(size.link_seconds(link) > 0 for link in LINKS)
