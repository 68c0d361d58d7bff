"""Paged attention: KV is found through block tables, written and read block by block.

It gathers and computes whole runs at once; a kernel walks the block table one block at a time, and
tests hold both equal. One layer's KV is [device_blocks, 2, block_tokens, kv_heads, head_size].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

Put = Callable[[Sequence[Tensor]], list[Tensor]]
"""Takes integers in host memory to where the engine computes."""


def stay(columns: Sequence[Tensor]) -> list[Tensor]:
    """A `Put` for engines that compute in host memory."""
    return list(columns)


@dataclass(frozen=True, slots=True)
class QueryRun:
    """One request's part of a step: its queries are the last `count` of `kv_count` tokens."""

    start: int  # First row in the step's flat tensors.
    count: int
    kv_count: int
    table: Tensor  # int64 device blocks that hold the kv_count tokens.
    mask: Tensor | None  # [count, kv_count]; None: plain causal, no tokens before this run.


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """All requests with a single query, padded to the longest."""

    rows: Tensor  # [requests] rows in the step's flat tensors.
    # [requests, blocks]. Padding repeats a block of the request's own: it is masked but read, and
    # what others own may be written meanwhile.
    tables: Tensor
    kv_counts: Tensor  # [requests]
    kv_count_max: int
    mask: Tensor  # [requests, 1, 1, blocks * block_tokens], True where a token is.


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where a step's tokens are written and what each attends to; shared by all layers."""

    block_tokens: int
    write_blocks: Tensor
    write_offsets: Tensor
    positions: Tensor
    prefills: tuple[QueryRun, ...]
    decodes: DecodeBatch | None


class Attention(Protocol):
    """Of one engine: it knows the engine's KV tensor of all layers."""

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: AttentionPlan) -> None:
        """Put the step's keys and values [tokens, kv_heads, head_size] where the plan says."""
        ...

    def attend(self, layer: int, queries: Tensor, plan: AttentionPlan) -> Tensor:
        """Of queries [tokens, heads, head_size] over KV that `write` has completed."""
        ...


class TorchAttention:
    """By torch's operations, wherever the tensors are."""

    def __init__(self, kv_cache: Tensor) -> None:
        self._kv_cache = kv_cache

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: AttentionPlan) -> None:
        write_kv(self._kv_cache[:, layer], keys, values, plan)

    def attend(self, layer: int, queries: Tensor, plan: AttentionPlan) -> Tensor:
        return paged_attention(queries, self._kv_cache[:, layer], plan)


def plan_attention(
    tables: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    block_tokens: int,
    put: Put = stay,
) -> AttentionPlan:
    """Plan a step in which request i computes the tokens `spans[i]` = (first, end)."""
    positions = torch.cat([torch.arange(first, end) for first, end in spans])
    write_blocks: list[Tensor] = []
    runs: list[tuple[int, int, int]] = []  # Row, first and end.
    run_tables: list[Tensor] = []
    decodes: list[tuple[int, Tensor, int]] = []  # Row, table and end.
    row = 0
    for table_blocks, (first, end) in zip(tables, spans, strict=True):
        table = torch.tensor(table_blocks[: -(-end // block_tokens)], dtype=torch.int64)
        write_blocks.append(table[torch.arange(first, end) // block_tokens])
        if end - first == 1:
            decodes.append((row, table, end))
        else:
            runs.append((row, first, end))
            run_tables.append(table)
        row += end - first
    step = [positions, torch.cat(write_blocks), positions % block_tokens]
    positions, blocks, offsets, *placed = put([*step, *run_tables, *_decode_columns(decodes)])
    return AttentionPlan(
        block_tokens=block_tokens,
        write_blocks=blocks,
        write_offsets=offsets,
        positions=positions,
        prefills=tuple(
            QueryRun(row, end - first, end, table, _causal_mask(first, end, table.device))
            for (row, first, end), table in zip(runs, placed[: len(runs)], strict=True)
        ),
        decodes=_batch_decodes(decodes, placed[len(runs) :], block_tokens) if decodes else None,
    )


def write_kv(kv: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> None:
    """Put the step's keys and values [tokens, kv_heads, head_size] where the plan says."""
    kv[plan.write_blocks, 0, plan.write_offsets] = keys
    kv[plan.write_blocks, 1, plan.write_offsets] = values


def paged_attention(queries: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
    """Attention of queries [tokens, heads, head_size] over KV that `write_kv` has completed."""
    out = torch.empty_like(queries)
    for run in plan.prefills:
        rows = slice(run.start, run.start + run.count)
        out[rows] = attend_run(queries[rows], kv, run)
    if plan.decodes is not None:
        out[plan.decodes.rows] = _attend_decodes(queries[plan.decodes.rows], kv, plan.decodes)
    return out


def attend_run(queries: Tensor, kv: Tensor, run: QueryRun) -> Tensor:
    """Attention of one request's `run.count` queries."""
    gathered = kv.index_select(0, run.table)  # [blocks, 2, block_tokens, kv_heads, head_size]
    keys, values = gathered.transpose(0, 1).flatten(1, 2)[:, : run.kv_count].transpose(1, 2)
    out = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=run.mask,
        is_causal=run.mask is None,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _causal_mask(first: int, end: int, device: torch.device) -> Tensor | None:
    """Made where it is used: it is large, and what it is made of is not."""
    if first == 0:
        return None
    keys = torch.arange(end, device=device)
    return keys <= torch.arange(first, end, device=device)[:, None]


def _decode_columns(decodes: Sequence[tuple[int, Tensor, int]]) -> list[Tensor]:
    """Rows, tables and counts; nothing without decodes."""
    if not decodes:
        return []
    longest = max(len(table) for _, table, _ in decodes)
    tables = torch.stack(
        [torch.cat((table, table[:1].expand(longest - len(table)))) for _, table, _ in decodes]
    )
    rows, kv_counts = ([decode[place] for decode in decodes] for place in (0, 2))
    return [torch.tensor(rows), tables, torch.tensor(kv_counts)]


def _batch_decodes(
    decodes: Sequence[tuple[int, Tensor, int]], placed: Sequence[Tensor], block_tokens: int
) -> DecodeBatch:
    rows, tables, kv_counts = placed
    tokens = torch.arange(tables.shape[1] * block_tokens, device=tables.device)
    return DecodeBatch(
        rows,
        tables,
        kv_counts,
        kv_count_max=max(kv_count for _, _, kv_count in decodes),
        mask=(tokens < kv_counts[:, None])[:, None, None, :],
    )


def _attend_decodes(queries: Tensor, kv: Tensor, batch: DecodeBatch) -> Tensor:
    """The query heads that share a KV head are its queries: nothing is repeated."""
    request_count, head_count, head_size = queries.shape
    _, _, block_tokens, kv_heads, _ = kv.shape
    gathered = kv.index_select(0, batch.tables.flatten())
    gathered = gathered.view(request_count, -1, 2, block_tokens, kv_heads, head_size)
    keys, values = gathered.permute(2, 0, 4, 1, 3, 5).flatten(3, 4)
    grouped = queries.view(request_count, kv_heads, head_count // kv_heads, head_size)
    out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=batch.mask)
    return out.view(request_count, head_count, head_size)
