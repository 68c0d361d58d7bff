"""New keys and values go to their places and nowhere else; addresses are those of the strides."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.kernels.test_copy_blocks import SIZES, all_sizes, layouts
from tests.support.kernel_kv import LAYOUTS, TwinKv
from tests.support.kernel_twin import Array, HostMemory, KernelLauncher, KernelTwin
from tests.support.kv_layouts import ITEM


@layouts
@all_sizes
def test_an_address_is_where_the_strides_say(host_twin: KernelTwin, layout: str, size: str) -> None:
    kv = LAYOUTS[layout](SIZES[size])
    assert kv.values is not None
    layers, blocks, heads, tokens, _ = kv.keys.shape
    places = list(itertools.product(*map(range, (layers, blocks, heads, tokens))))
    found = HostMemory.zeros(16 * len(places))
    # A geometry at address 0, so that what comes back are offsets.
    geometry = kv.geometry()
    geometry.references.clear()
    rows = HostMemory.of(np.array(places, np.int64))
    host_twin.launch("kv_addresses", found.at(), geometry.at(), rows.at(), len(places))
    start = kv.memory.data.ctypes.data
    expected = [
        view[place].ctypes.data - start for place in places for view in (kv.keys, kv.values)
    ]
    np.testing.assert_array_equal(found.data.view(np.uint64), expected)


@layouts
@all_sizes
@pytest.mark.parametrize("gap", [0, 24])
def test_new_tokens_are_written_to_their_places_only(
    kernels: KernelLauncher, layout: str, size: str, gap: int
) -> None:
    """Keys and values come as parts of one wide row, as a fused projection gives them."""
    kv = LAYOUTS[layout](SIZES[size])
    assert kv.values is not None
    layer = kv.keys.shape[0] - 1
    _, block_count, head_count, block_tokens, _ = kv.keys.shape
    rng = np.random.default_rng(1)
    capacity = block_count * block_tokens
    places = rng.permutation(capacity)[: max(1, capacity // 2)].astype(np.int64)
    tokens = {
        name: rng.integers(0, 1 << 16, (len(places), head_count, view.shape[-1]), np.uint16)
        for name, view in (("keys", kv.keys), ("values", kv.values))
    }
    expected = kv.memory.data.copy()
    for view, rows in ((kv.keys, tokens["keys"]), (kv.values, tokens["values"])):
        target = same_view(view, kv, expected)
        for row, place in enumerate(places.tolist()):
            target[layer, place // block_tokens, :, place % block_tokens] = rows[row]
    write(kernels, kv, layer, places, tokens, gap)
    np.testing.assert_array_equal(kv.memory.data, expected)


@pytest.mark.parametrize("place", [-1, -(2**40), 28, 2**40])
def test_a_token_without_a_place_is_not_written(kernels: KernelLauncher, place: int) -> None:
    """Padding of a batch; and 28 is the first place beyond 7 blocks of 4."""
    kv = LAYOUTS["packed LBHNC"](SIZES["even"])
    before = kv.memory.data.copy()
    tokens = {name: np.ones((1, 2, 8), np.uint16) for name in ("keys", "values")}
    write(kernels, kv, 0, np.array([place]), tokens, 0)
    np.testing.assert_array_equal(kv.memory.data, before)


def same_view(view: Array, kv: TwinKv, data: Array) -> Array:
    offset = int(view.ctypes.data - kv.memory.data.ctypes.data)
    return np.ndarray(view.shape, view.dtype, data, offset, view.strides)


def write(
    kernels: KernelLauncher,
    kv: TwinKv,
    layer: int,
    places: Array,
    tokens: dict[str, Array],
    gap: int,
) -> None:
    keys, values = (tokens[name].reshape(len(places), -1) for name in ("keys", "values"))
    spare = np.zeros((len(places), gap // ITEM), np.uint16)
    fused = HostMemory.of(np.concatenate([keys, spare, values], axis=1))
    step = ITEM * (keys.shape[1] + values.shape[1]) + gap
    kernels.launch(
        "write_kv",
        fused.at(),
        step,
        fused.at(ITEM * keys.shape[1] + gap),
        step,
        HostMemory.of(places.astype(np.int64)).at(),
        len(places),
        kv.geometry().at(),
        layer,
        grid_count=1,
    )
