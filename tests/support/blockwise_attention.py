"""Attention of one query, block by block as a kernel does it: the judge of the engine's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reference_attention(query: Tensor, kv: Tensor, table: Sequence[int], kv_count: int) -> Tensor:
    """One query [heads, head_size] over the first `kv_count` tokens of `table`, block by block.

    Keeps the running maximum, sum and weighted values of the softmax, so that no block is seen
    twice and no score is kept.
    """
    block_tokens, kv_heads, head_size = kv.shape[2:]
    grouped = query.view(kv_heads, -1, head_size).float() * head_size**-0.5
    best = torch.full(grouped.shape[:2], float("-inf"))
    total = torch.zeros_like(best)
    weighted = torch.zeros_like(grouped)
    for index in range(-(-kv_count // block_tokens)):
        token_count = min(block_tokens, kv_count - index * block_tokens)
        keys, values = kv[table[index], :, :token_count].float()
        scores = torch.einsum("hgd,thd->hgt", grouped, keys)
        new_best = torch.maximum(best, scores.amax(-1))
        weights = torch.exp(scores - new_best[..., None])
        shrink = torch.exp(best - new_best)
        total = total * shrink + weights.sum(-1)
        weighted = weighted * shrink[..., None] + torch.einsum("hgt,thd->hgd", weights, values)
        best = new_best
    return (weighted / total[..., None]).view_as(query).to(query.dtype)
