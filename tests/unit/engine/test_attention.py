"""Paged attention, its block-by-block reference and plain dense attention are one function."""

from __future__ import annotations

import random

import pytest
import torch

from kvtier.engine.attention import (
    paged_attention,
    plan_attention,
    write_kv,
)
from tests.support.blockwise_attention import reference_attention

BLOCK_TOKENS, HEADS, KV_HEADS, HEAD_SIZE = 4, 6, 2, 8

CASES = {
    "one prefill": [(0, 9)],
    "one token": [(0, 1)],
    "prefill after a prefix": [(8, 21)],
    "prefill from inside a block": [(6, 13)],
    "decodes of unequal length": [(3, 4), (16, 17), (40, 41)],
    "prefills and decodes mixed": [(0, 7), (12, 13), (5, 11), (31, 32)],
    "exact blocks": [(0, 8), (7, 8), (4, 8)],
}


class Paged:
    """Requests with shuffled, interleaved block tables, every token's KV written."""

    def __init__(self, spans: list[tuple[int, int]], seed: int) -> None:
        torch.manual_seed(seed)
        blocks = list(range(1, 80))
        random.Random(seed).shuffle(blocks)
        counts = [-(-end // BLOCK_TOKENS) for _, end in spans]
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]
        self.kv = torch.full((80, 2, BLOCK_TOKENS, KV_HEADS, HEAD_SIZE), 1e4)
        self.keys = [torch.randn(end, KV_HEADS, HEAD_SIZE) for _, end in spans]
        self.values = [torch.randn(end, KV_HEADS, HEAD_SIZE) for _, end in spans]
        whole = plan_attention(self.tables, [(0, end) for _, end in spans], BLOCK_TOKENS)
        write_kv(self.kv, torch.cat(self.keys), torch.cat(self.values), whole)
        self.queries = torch.randn(sum(end - first for first, end in spans), HEADS, HEAD_SIZE)
        self.plan = plan_attention(self.tables, spans, BLOCK_TOKENS)


def dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query over its keys, written out."""
    repeat = HEADS // KV_HEADS
    keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    weights = torch.softmax(torch.einsum("hd,thd->ht", query, keys) / HEAD_SIZE**0.5, dim=-1)
    return torch.einsum("ht,thd->hd", weights, values)


@pytest.mark.parametrize("spans", CASES.values(), ids=CASES.keys())
def test_paged_reference_and_dense_agree(spans: list[tuple[int, int]]) -> None:
    paged = Paged(spans, seed=len(spans))
    out = paged_attention(paged.queries, paged.kv, paged.plan)
    row = 0
    for index, (first, end) in enumerate(spans):
        for position in range(first, end):
            query, count = paged.queries[row], position + 1
            by_block = reference_attention(query, paged.kv, paged.tables[index], count)
            plain = dense(query, paged.keys[index][:count], paged.values[index][:count])
            torch.testing.assert_close(out[row], plain, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(by_block, plain, atol=1e-5, rtol=1e-5)
            row += 1


def test_online_softmax_survives_scores_that_overflow_exp() -> None:
    paged = Paged([(0, 12)], seed=1)
    query = paged.queries[-1] * 500
    by_block = reference_attention(query, paged.kv, paged.tables[0], 12)
    plain = dense(query, paged.keys[0], paged.values[0])
    torch.testing.assert_close(by_block, plain, atol=1e-4, rtol=1e-4)


def test_tokens_past_the_end_of_the_last_block_are_not_seen() -> None:
    paged = Paged([(5, 6), (0, 3)], seed=2)
    before = paged_attention(paged.queries, paged.kv, paged.plan)
    paged.kv[paged.tables[0][1], :, 2:] = -7e3
    paged.kv[paged.tables[1][0], :, 3:] = -7e3
    torch.testing.assert_close(paged_attention(paged.queries, paged.kv, paged.plan), before)


def test_write_touches_only_the_planned_tokens() -> None:
    kv = torch.zeros(8, 2, BLOCK_TOKENS, KV_HEADS, HEAD_SIZE)
    plan = plan_attention([[5, 2]], [(3, 6)], BLOCK_TOKENS)
    write_kv(kv, torch.ones(3, KV_HEADS, HEAD_SIZE), torch.ones(3, KV_HEADS, HEAD_SIZE), plan)
    written = kv[:, 0, :, 0, 0].nonzero().tolist()
    assert written == [[2, 0], [2, 1], [5, 3]]


def test_padding_reads_no_block_of_others() -> None:
    """They may be written meanwhile, by copies for another request."""
    plan = plan_attention([[5, 2, 7], [3]], [(10, 11), (2, 3)], BLOCK_TOKENS)
    assert plan.decodes is not None
    assert plan.decodes.tables.tolist() == [[5, 2, 7], [3, 3, 3]]
