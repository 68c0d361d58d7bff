"""Picking a token."""

from __future__ import annotations

import torch

from kvtier.engine.config import GREEDY_BELOW, SamplingParams
from kvtier.engine.sampler import pick_token

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def draws(params: SamplingParams, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(params.seed)
    return [pick_token(LOGITS, params, generator) for _ in range(count)]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert set(draws(SamplingParams(), 5)) == {0}


def test_draws_follow_the_probabilities() -> None:
    drawn = draws(SamplingParams(temperature=1.0), 2000)
    assert abs(drawn.count(0) / 2000 - 0.5) < 0.05
    assert abs(drawn.count(3) / 2000 - 0.05) < 0.02


def test_top_p_keeps_the_fewest_that_make_it_up() -> None:
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.8), 300)) == {0, 1}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.81), 300)) == {0, 1, 2}


def test_tiny_temperature_takes_the_likeliest() -> None:
    """Divided by less than float32's least number the logits would be no numbers."""
    for temperature in (1e-300, GREEDY_BELOW):
        assert set(draws(SamplingParams(temperature=temperature), 20)) == {0}


def test_tiny_top_p_still_leaves_one() -> None:
    assert set(draws(SamplingParams(temperature=1.0, top_p=1e-6), 20)) == {0}
