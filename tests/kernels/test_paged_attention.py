"""Decode attention against NumPy in float64: the difference is the rounding of the result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

import numpy as np
import pytest

from tests.support.kernel_kv import LAYOUTS, TwinKv
from tests.support.kernel_twin import Array, HostMemory, KernelLauncher
from tests.support.kv_layouts import Sizes

# Of an output as a whole, by the norm of the difference.
RELATIVE = 2e-3
# Of each value, half a unit in its last place: the rounding of the result, and nothing else.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
# Values near 0 are sums of larger ones that cancel: for them the size of those counts.
ABSOLUTE = 2e-6

RECORD_FLOATS = 4  # Before the weighted values; see paged_attention.cuh.


@dataclass(frozen=True)
class Case:
    """A decode step of one layer."""

    element: str = "bf16"
    width: int = 64
    block_tokens: int = 16
    heads: tuple[int, int] = (4, 2)  # Of queries and of keys.
    kv_counts: tuple[int, ...] = (1, 15, 16, 17, 75)
    layout: str = "split L2BNHC"
    split_count: int = 1
    magnitude: float = 1.0

    @property
    def table_blocks(self) -> int:
        return -(-max(self.kv_counts) // self.block_tokens) + 1


def to_float64(bits: Array, element: str) -> Array:
    if element == "fp16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], case: Case) -> Array:
    values = (case.magnitude * rng.standard_normal(shape)).astype(np.float32)
    if case.element == "fp16":
        return values.astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def attend(kernels: KernelLauncher, case: Case, grid_count: int = 3) -> tuple[Array, Array]:
    """(what the kernel gives, what NumPy gives), [requests, query heads, width]."""
    rng = np.random.default_rng(7)
    kv, tables, layer = make_kv(case, rng)
    queries = random_bits(rng, (len(case.kv_counts), case.heads[0], case.width), case)
    found = launch(kernels, case, (kv, tables, layer), queries, grid_count)
    return to_float64(found, case.element), reference(case, (kv, tables, layer), queries)


def make_kv(case: Case, rng: np.random.Generator) -> tuple[TwinKv, Array | None, int]:
    """Blocks of several requests in no order; NaN wherever no token is."""
    requests = len(case.kv_counts)
    is_contiguous = case.layout == "contiguous"
    block_count = requests * case.table_blocks + 3 * (not is_contiguous)
    sizes = Sizes(
        layers=2,
        blocks=block_count,
        heads=case.heads[1],
        tokens=case.block_tokens,
        width=case.width,
    )
    kv = LAYOUTS[case.layout](sizes)
    kv.memory.data[:] = 0xFF
    tables = None
    if not is_contiguous:
        tables = rng.permutation(block_count)[: requests * case.table_blocks].astype(np.int32)
        tables = tables.reshape(requests, case.table_blocks)
    assert kv.values is not None
    for request, kv_count in enumerate(case.kv_counts):
        for token in range(kv_count):
            block = block_of(case, tables, request, token)
            for view in (kv.keys, kv.values):
                view[1, block, :, token % case.block_tokens] = random_bits(
                    rng, (case.heads[1], case.width), case
                )
    return kv, tables, 1


def block_of(case: Case, tables: Array | None, request: int, token: int) -> int:
    rank = token // case.block_tokens
    if tables is None:
        return request * case.table_blocks + rank
    return int(tables[request, rank])


def reference(case: Case, kv_of: tuple[TwinKv, Array | None, int], queries: Array) -> Array:
    kv, tables, layer = kv_of
    assert kv.values is not None
    out = np.zeros(queries.shape)
    shared_by = case.heads[0] // case.heads[1]
    for request, kv_count in enumerate(case.kv_counts):
        if not kv_count:
            continue
        places = [
            (block_of(case, tables, request, token), token % case.block_tokens)
            for token in range(kv_count)
        ]
        keys, values = (
            to_float64(np.stack([view[layer, block, :, at] for block, at in places]), case.element)
            for view in (kv.keys, kv.values)
        )
        for head in range(case.heads[0]):
            query = to_float64(queries[request, head], case.element)
            scores = keys[:, head // shared_by] @ query * case.width**-0.5
            weights = np.exp(scores - scores.max())
            out[request, head] = weights @ values[:, head // shared_by] / weights.sum()
    return out


def launch(
    kernels: KernelLauncher,
    case: Case,
    kv_of: tuple[TwinKv, Array | None, int],
    queries: Array,
    grid_count: int,
) -> Array:
    kv, tables, layer = kv_of
    name = f"{case.element}_{case.width}"
    out = HostMemory.zeros(queries.nbytes)
    scale = np.float32(case.width**-0.5 * log2(np.e)).view(np.uint32)
    row_count = queries.shape[0] * queries.shape[1]
    partials = HostMemory.of(
        np.full((row_count, case.split_count, RECORD_FLOATS + case.width), np.nan, np.float32)
    )
    is_split = case.split_count > 1
    kernels.launch(
        f"paged_attention_{name}",
        *(out.at(), HostMemory.of(queries).at(), kv.geometry().at(), layer),
        *(0 if tables is None else HostMemory.of(tables).at(), case.table_blocks),
        *(HostMemory.of(np.array(case.kv_counts, np.int32)).at(), len(case.kv_counts)),
        *(case.heads[0], int(scale), case.split_count, partials.at() if is_split else 0),
        grid_count=grid_count,
        block_threads=128,
    )
    if is_split:
        kernels.launch(f"merge_splits_{name}", out.at(), partials.at(), row_count, case.split_count)
    return out.data.view(np.uint16).reshape(queries.shape)


def check(kernels: KernelLauncher, case: Case) -> None:
    found, expected = attend(kernels, case)
    assert_equals(found, expected, case)


def assert_equals(found: Array, expected: Array, case: Case) -> None:
    np.testing.assert_allclose(
        found, expected, rtol=ROUNDING[case.element] + 1e-5, atol=ABSOLUTE * case.magnitude
    )
    assert np.linalg.norm(found - expected) <= RELATIVE * np.linalg.norm(expected)


elements = pytest.mark.parametrize("element", ["bf16", "fp16"])
widths = pytest.mark.parametrize("width", [64, 128])


@elements
@widths
@pytest.mark.parametrize("block_tokens", [8, 16, 24, 32, 64, 128])
def test_every_block_size_equals_float64(
    kernels: KernelLauncher, element: str, width: int, block_tokens: int
) -> None:
    counts = (1, block_tokens - 1, block_tokens, block_tokens + 1, 150)
    case = Case(element, width, block_tokens, kv_counts=counts)
    check(kernels, case)


@elements
@widths
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 2), (9, 3), (7, 1), (14, 2), (16, 1)])
def test_query_heads_share_their_kv_head(
    kernels: KernelLauncher, element: str, width: int, heads: tuple[int, int]
) -> None:
    check(kernels, Case(element, width, heads=heads, kv_counts=(5, 40)))


@widths
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "MLA"])
def test_every_layout_gives_the_same(kernels: KernelLauncher, width: int, layout: str) -> None:
    check(kernels, Case(width=width, layout=layout, kv_counts=(33, 7, 16)))


@elements
@widths
@pytest.mark.parametrize("split_count", [2, 3, 8])
def test_splits_of_the_tokens_are_merged(
    kernels: KernelLauncher, element: str, width: int, split_count: int
) -> None:
    """Some of them are empty: 1 and 5 tokens in 8 parts."""
    check(kernels, Case(element, width, kv_counts=(1, 5, 64, 217), split_count=split_count))


@pytest.mark.parametrize("split_count", [1, 2])
def test_a_request_without_tokens_gets_zeros(kernels: KernelLauncher, split_count: int) -> None:
    case = Case(kv_counts=(0, 3, 0), split_count=split_count)
    found, expected = attend(kernels, case)
    assert not found[[0, 2]].any()
    assert_equals(found, expected, case)


@elements
def test_scores_far_apart_do_not_overflow(kernels: KernelLauncher, element: str) -> None:
    """Scores of thousands: their powers do not exist, the differences from the best do."""
    check(kernels, Case(element, magnitude=30.0, kv_counts=(1, 2, 90), split_count=2))


def test_the_grid_does_not_change_a_bit(kernels: KernelLauncher) -> None:
    case = Case(heads=(6, 2), kv_counts=(20, 50))
    results = [attend(kernels, case, grid_count)[0] for grid_count in (1, 4, 64)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_a_missing_token_is_noticed(kernels: KernelLauncher) -> None:
    """That the limit is tight enough to fail: one token of 75 less is far outside of it."""
    case = Case()
    found, _ = attend(kernels, replace(case, kv_counts=(1, 15, 16, 17, 74)))
    _, expected = attend(kernels, case)
    with pytest.raises(AssertionError):
        assert_equals(found[4], expected[4], case)
