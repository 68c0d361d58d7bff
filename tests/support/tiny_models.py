"""Models small enough for unit tests, with every feature that can go wrong: groups, many layers."""

from __future__ import annotations

import random
from functools import lru_cache

from kvtier.engine.config import EngineConfig, ModelConfig, SamplingParams
from kvtier.engine.engine import Engine
from kvtier.engine.model import LlamaModel, random_model
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
