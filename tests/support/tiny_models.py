"""Models small enough for unit tests, with every feature that can go wrong: groups, many layers."""

from __future__ import annotations

import math
import random
from functools import lru_cache

import torch
from torch import Tensor

from kvtier.engine.config import EngineConfig, ModelConfig, SamplingParams
from kvtier.engine.engine import Engine
from kvtier.engine.model import LayerWeights, LlamaModel, ModelWeights
from tests.support.engine_form import HostForm, current_form, engine_form

TINY = ModelConfig(
    layer_count=2,
    hidden_size=32,
    ffn_size=48,
    head_count=4,
    kv_head_count=2,
    head_size=8,
    vocab_size=97,
    context_tokens_max=512,
)


@lru_cache(maxsize=4)
def tiny_model(seed: int = 0) -> LlamaModel:
    return random_model(TINY, seed)


def tiny_engine(**options: object) -> Engine:
    """An engine of blocks of 4 tokens."""
    config = EngineConfig(**{"block_tokens": 4, "device_block_count": 64, **options})  # type: ignore[arg-type]
    config = current_form().config_of(config)
    device = current_form().make_device(tiny_model(), config)
    return Engine(tiny_model(), config, device=device, pause=lambda _: None)


def prompt_of(token_count: int, *, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(TINY.vocab_size), k=token_count)


def tokens_alone(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    """What the request gives when nothing else runs and nothing is cached, in host memory."""
    with engine_form(HostForm()):
        return _tokens_alone(tuple(prompt), params)


@lru_cache(maxsize=256)
def _tokens_alone(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    return tiny_engine(prefix_caching=False).generate([prompt], params)[0].token_ids


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
