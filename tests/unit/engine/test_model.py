"""The forward pass against the `transformers` package, for shapes that differ in every respect."""

from __future__ import annotations

import pytest
import torch

from kvtier.engine.attention import plan_attention
from kvtier.engine.config import EngineConfig, ModelConfig
from kvtier.engine.kv_cache import make_kv_cache
from kvtier.engine.model import LlamaModel
from tests.support.tiny_models import TINY, random_model
from tests.support.transformers_twin import to_transformers

SHAPES = {
    "grouped heads": TINY,
    "one KV head for each": ModelConfig(3, 24, 40, 3, 3, 8, 50, rope_base=500.0),
    "one KV head for all": ModelConfig(1, 16, 8, 4, 1, 10, 33, norm_epsilon=1e-3),
}


def logits_of(model: LlamaModel, token_ids: list[int]) -> torch.Tensor:
    """Logits at every position."""
    kv_cache = make_kv_cache(model, EngineConfig(device_block_count=4))
    plan = plan_attention([[2, 0, 3]], [(0, len(token_ids))], 16)
    return model.forward(torch.tensor(token_ids), kv_cache, plan, torch.arange(len(token_ids)))


@pytest.mark.slow  # Importing transformers takes seconds.
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_logits_are_those_of_transformers(config: ModelConfig) -> None:
    model = random_model(config, seed=4)
    token_ids = [(7 * index) % config.vocab_size for index in range(33)]
    with torch.inference_mode():
        expected = to_transformers(model)(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(logits_of(model, token_ids), expected, atol=2e-5, rtol=2e-5)


def test_model_of_a_seed_is_always_the_same() -> None:
    assert random_model(TINY, 3).weights_digest == random_model(TINY, 3).weights_digest
    assert random_model(TINY, 3).weights_digest != random_model(TINY, 4).weights_digest


def test_bfloat16_stays_near_float32() -> None:
    token_ids = list(range(20))
    exact = logits_of(random_model(TINY, 5), token_ids)
    rounded = logits_of(random_model(TINY, 5, dtype=torch.bfloat16), token_ids)
    assert rounded.dtype == torch.float32
    assert (exact - rounded).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"kv_head_count": 3}, "no multiple"), ({"head_size": 7}, "is odd")],
)
def test_impossible_shape_is_refused(options: dict[str, int], message: str) -> None:
    fields = {name: getattr(TINY, name) for name in ModelConfig.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**fields, **options})
