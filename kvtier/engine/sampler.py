"""Picks the next token: greedily, or by a seeded draw from the likeliest."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtier.engine.config import SamplingParams


def pick_token(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """One token id out of `logits` [vocab]; the draw depends on the request's generator alone."""
    if params.is_greedy:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / params.temperature, dim=-1)
    if params.top_p < 1.0:
        probabilities = _keep_top(probabilities, params.top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _keep_top(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the fewest likeliest tokens that make up `top_p` together."""
    ordered, order = probabilities.sort(descending=True)
    ordered[ordered.cumsum(dim=-1) - ordered >= top_p] = 0.0
    return torch.zeros_like(probabilities).scatter_(0, order, ordered)
