"""A request's KV in kernels: written, read, offloaded, lost, onboarded and read again."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.test_paged_attention import Case, assert_equals, launch, random_bits, to_float64
from tests.support.kernel_kv import LAYOUTS, TwinKv
from tests.support.kernel_twin import Array, HostMemory, KernelLauncher
from tests.support.kv_layouts import ITEM, Sizes

CASE = Case(element="bf16", width=64, block_tokens=8, heads=(6, 2), kv_counts=(37,))
LAYER = 1
OLD_BLOCKS, NEW_BLOCKS = [9, 2, 5, 0, 7], [1, 8, 3, 6, 4]


def expected_attention(case: Case, tokens: dict[str, Array], queries: Array) -> Array:
    """From the tokens as they were made; no cache is in it."""
    out = np.zeros(queries.shape)
    for head in range(case.heads[0]):
        keys, values = (
            to_float64(tokens[name][:, head // 3], case.element) for name in ("keys", "values")
        )
        scores = keys @ to_float64(queries[0, head], case.element) * case.width**-0.5
        weights = np.exp(scores - scores.max())
        out[0, head] = weights @ values / weights.sum()
    return out


def write_tokens(
    kernels: KernelLauncher, kv: TwinKv, tokens: dict[str, Array], blocks: list[int]
) -> None:
    """First a prefill's tokens at once, then each decoded one by itself."""
    places = np.array(
        [
            blocks[token // CASE.block_tokens] * CASE.block_tokens + token % CASE.block_tokens
            for token in range(CASE.kv_counts[0])
        ]
    )
    step = ITEM * CASE.heads[1] * CASE.width
    for first, end in [(0, 30), *((token, token + 1) for token in range(30, CASE.kv_counts[0]))]:
        keys, values = (HostMemory.of(tokens[name][first:end]) for name in ("keys", "values"))
        kernels.launch(
            "write_kv",
            *(keys.at(), step, values.at(), step),
            *(HostMemory.of(places[first:end]).at(), end - first, kv.geometry().at(), LAYER),
        )


def move_blocks(
    kernels: KernelLauncher, name: str, kv: TwinKv, blocks: list[int], slots: HostMemory
) -> None:
    places = slots.column(np.arange(len(blocks)) * kv.layout.shard_bytes)
    kernels.launch(
        name,
        *(kv.runs().at(), len(kv.layout.sizes)),
        *(HostMemory.table(blocks).at(), HostMemory.table(places).at(), len(blocks), 1),
    )


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("MLA", "contiguous")])
def test_onboarded_blocks_give_the_same_bits_in_other_places(
    kernels: KernelLauncher, layout: str
) -> None:
    rng = np.random.default_rng(5)
    kv = LAYOUTS[layout](Sizes(layers=2, blocks=10, heads=2, tokens=8, width=64))
    kv.memory.data[:] = 0xFF
    shape = (CASE.kv_counts[0], CASE.heads[1], CASE.width)
    tokens = {name: random_bits(rng, shape, CASE) for name in ("keys", "values")}
    queries = random_bits(rng, (1, CASE.heads[0], CASE.width), CASE)

    write_tokens(kernels, kv, tokens, OLD_BLOCKS)
    first = attend(kernels, kv, OLD_BLOCKS, queries)
    expected = expected_attention(CASE, tokens, queries)
    assert_equals(to_float64(first, CASE.element), expected, CASE)

    slots = HostMemory.zeros(len(OLD_BLOCKS) * kv.layout.shard_bytes)
    move_blocks(kernels, "gather_blocks", kv, OLD_BLOCKS, slots)
    kv.memory.data[:] = 0xFF
    move_blocks(kernels, "scatter_blocks", kv, NEW_BLOCKS, slots)
    np.testing.assert_array_equal(attend(kernels, kv, NEW_BLOCKS, queries), first)


def attend(kernels: KernelLauncher, kv: TwinKv, blocks: list[int], queries: Array) -> Array:
    tables = np.array([[*blocks, 0]], np.int32)  # As wide as the case has it.
    assert tables.shape[1] == CASE.table_blocks
    return launch(kernels, CASE, (kv, tables, LAYER), queries, grid_count=2)
