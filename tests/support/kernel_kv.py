"""KV caches as kernels see them: NumPy views [layer, block, head, token, element] of host memory.

The reference is always NumPy's own indexing of these views; a geometry or a layout comes from their
strides alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtier.cuda.device_layout import DeviceLayout, DeviceTensor, layout_of
from tests.support.kernel_twin import Address, Array, HostMemory
from tests.support.kv_layouts import ITEM, Sizes


@dataclass(eq=False)
class TwinKv:
    """The KV of one group of layers; `values` is None where a latent holds both."""

    memory: HostMemory
    tensors: list[DeviceTensor]  # At offsets into the memory.
    keys: Array  # Views of uint16.
    values: Array | None

    @property
    def layout(self) -> DeviceLayout:
        return layout_of(self.tensors)

    def runs(self) -> HostMemory:
        """The layout as the kernels take it."""
        layout = self.layout
        return HostMemory.table(
            self.memory.column(layout.addresses), layout.steps, layout.sizes, layout.places
        )

    def geometry(self) -> HostMemory:
        """Of the whole group; see KvGeometry."""
        offset = _offset(self.keys, self.memory)
        value_step = 0 if self.values is None else _offset(self.values, self.memory) - offset
        layer_step, block_step, head_step, token_step, _ = self.keys.strides
        _, block_count, head_count, block_tokens, width = self.keys.shape
        value_width = 0 if self.values is None else self.values.shape[-1]
        return HostMemory.table(
            [self.memory.at(offset), layer_step, block_step, head_step, token_step, value_step],
            [block_count, block_tokens, head_count, ITEM * width, ITEM * value_width],
        )

    def block_bytes(self, block: int) -> Array:
        """What a slot should hold of it: by indices, element after element."""
        found = []
        for tensor in self.tensors:
            whole = np.ndarray(
                (*tensor.shape, tensor.element_bytes),
                np.uint8,
                self.memory.data,
                tensor.address,
                (*tensor.strides, 1),
            )
            found.append(whole[(slice(None),) * tensor.block_dim + (block,)].reshape(-1))
        return np.concatenate(found)


def _offset(view: Array, memory: HostMemory) -> int:
    return int(view.ctypes.data - memory.data.ctypes.data)


def _tensor(view: Array, memory: HostMemory, block_dim: int) -> DeviceTensor:
    strides = tuple(
        stride if size > 1 else ITEM for size, stride in zip(view.shape, view.strides, strict=True)
    )
    return DeviceTensor(_offset(view, memory), view.shape, strides, ITEM, block_dim)


def _filled(length_bytes: int, misalignment: int = 0) -> HostMemory:
    data = np.random.default_rng(length_bytes).integers(0, 256, length_bytes, np.uint8)
    return HostMemory(data, misalignment)


def by_order(sizes: Sizes, order: str) -> TwinKv:
    """One storage with its dimensions in this order: "2" are keys and values apart, and where it
    is missing they stand side by side in C. The engine is given a tensor for each layer."""
    is_packed = "2" not in order
    width = sizes.width
    dims = sizes.of(order)
    if is_packed:
        dims = (*dims[:-1], 2 * width)
    memory = _filled(int(np.prod(dims)) * ITEM)
    whole = memory.data.view(np.uint16).reshape(dims)
    names = "LBHNC" if is_packed else "2LBHNC"
    view = whole.transpose([order.index(name) for name in names])
    if is_packed:
        tensors = [_tensor(view[layer], memory, 0) for layer in range(sizes.layers)]
        return TwinKv(memory, tensors, view[..., :width], view[..., width:])
    tensors = [_tensor(view[:, layer], memory, 1) for layer in range(sizes.layers)]
    return TwinKv(memory, tensors, view[0], view[1])


def reference_engine(sizes: Sizes) -> TwinKv:
    """[blocks, layers, 2, tokens, heads, width] as one tensor: a block is one run."""
    kv = by_order(sizes, "BL2NHC")
    shape = sizes.of("BL2NHC")
    whole = kv.memory.data.view(np.uint16).reshape(shape)
    return TwinKv(kv.memory, [_tensor(whole, kv.memory, 0)], kv.keys, kv.values)


def latent(sizes: Sizes) -> TwinKv:
    """MLA: one latent for a token, its rotary part (here of 4) behind it."""
    rotary = 4
    shape = (sizes.layers, sizes.blocks, 1, sizes.tokens, sizes.width + rotary)
    memory = _filled(int(np.prod(shape)) * ITEM)
    view = memory.data.view(np.uint16).reshape(shape)
    tensors = [_tensor(view[layer, :, 0], memory, 0) for layer in range(sizes.layers)]
    return TwinKv(memory, tensors, view[..., : sizes.width], view[..., sizes.width :])


def contiguous(sizes: Sizes) -> TwinKv:
    """vAttention: a request's tokens in one stretch of addresses, [2, layers, requests, tokens,
    heads, width]; a block is `tokens` of them, and this is the second request of three."""
    request_tokens = sizes.blocks * sizes.tokens
    shape = (2, sizes.layers, 3, request_tokens, sizes.heads, sizes.width)
    memory = _filled(int(np.prod(shape)) * ITEM)
    mine = memory.data.view(np.uint16).reshape(shape)[:, :, 1]
    blocks = np.lib.stride_tricks.as_strided(
        mine,
        (2, sizes.layers, sizes.blocks, sizes.tokens, sizes.heads, sizes.width),
        (*mine.strides[:2], sizes.tokens * mine.strides[2], *mine.strides[2:]),
    )
    view = blocks.transpose(0, 1, 2, 4, 3, 5)
    tensors = [
        _tensor(view[part, layer], memory, 0) for layer in range(sizes.layers) for part in (0, 1)
    ]
    return TwinKv(memory, tensors, view[0], view[1])


LAYOUTS: dict[str, Callable[[Sizes], TwinKv]] = {
    "split L2BNHC": lambda sizes: by_order(sizes, "L2BNHC"),
    "split L2BHNC": lambda sizes: by_order(sizes, "L2BHNC"),
    "packed LBHNC": lambda sizes: by_order(sizes, "LBHNC"),
    "packed LBNHC": lambda sizes: by_order(sizes, "LBNHC"),
    "heads outside LHBNC": lambda sizes: by_order(sizes, "LHBNC"),
    "block-outermost BLHNC": lambda sizes: by_order(sizes, "BLHNC"),
    "block-outermost BLNHC": lambda sizes: by_order(sizes, "BLNHC"),
    "block-outermost BHLNC": lambda sizes: by_order(sizes, "BHLNC"),
    "reference engine": reference_engine,
    "MLA": latent,
    "contiguous": contiguous,
}


def slot_column(memory: HostMemory, slot_bytes: int, count: int) -> list[Address]:
    return memory.column(np.arange(count) * slot_bytes)
