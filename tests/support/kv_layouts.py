"""KV tensors in every layout that engines use, on a fake device, with NumPy as the reference.

The names are vLLM's: L layers, B blocks, H heads, N tokens, C what a token has for a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kvtier.cuda.device_layout import DeviceLayout, DeviceTensor, layout_of
from kvtier.cuda.fake import FakeCudart
from kvtier.memory import Bytes

ITEM = 2  # bf16

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Of a small model; odd ones find what even ones hide."""

    layers: int = 3
    blocks: int = 7
    heads: int = 2
    tokens: int = 4
    width: int = 8

    def of(self, order: str) -> Dims:
        by_name = {
            "L": self.layers,
            "B": self.blocks,
            "H": self.heads,
            "N": self.tokens,
            "C": self.width,
            "2": 2,
        }
        return tuple(by_name[name] for name in order)


class DeviceKv:
    """Tensors of one KV group in one allocation, and what a block's bytes should be."""

    def __init__(self, cuda: FakeCudart, tensors: Sequence[DeviceTensor], memory: Bytes) -> None:
        self.cuda = cuda
        self.tensors = tensors
        self.memory = memory
        self.layout: DeviceLayout = layout_of(tensors)

    def views(self, block: int) -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
        """The block's elements of every tensor, as bytes, writable."""
        found = []
        for tensor in self.tensors:
            whole = np.ndarray(
                (*tensor.shape, tensor.element_bytes),
                np.uint8,
                self.memory,
                tensor.address - self.base,
                (*tensor.strides, 1),
            )
            index = (slice(None),) * tensor.block_dim + (block,)
            found.append(whole[index])
        return found

    @property
    def base(self) -> int:
        return min(tensor.address for tensor in self.tensors)

    def block_bytes(self, block: int) -> Bytes:
        """By NumPy alone, element after element: nothing of `layout_of` is in it."""
        return np.concatenate([view.reshape(-1) for view in self.views(block)])

    @property
    def span(self) -> tuple[int, int]:
        """All of the allocation, for what an engine's kernels touch."""
        return self.base, len(self.memory)


def one_storage(cuda: FakeCudart, sizes: Sizes, order: str, *, by_layer: bool) -> DeviceKv:
    """[order] in one storage, as one tensor or as a view (without L) for each layer."""
    shape = sizes.of(order)
    strides = [ITEM * prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = prod(shape) * ITEM
    address = cuda.allocate_device(length)
    memory = cuda.device_bytes(address, length)
    if not by_layer:
        tensors = [DeviceTensor(address, shape, tuple(strides), ITEM, order.index("B"))]
        return DeviceKv(cuda, tensors, memory)
    # As vLLM hands them out: a view [B, H, N, C] (or [2, B, ...]) of each layer, by strides.
    layer_dim = order.index("L")
    names = order.replace("L", "")
    logical = "2BNHC" if "2" in names else "BHNC" if "H" in names else "BNC"
    dims = [order.index(name) for name in logical]
    tensors = [
        DeviceTensor(
            address + layer * strides[layer_dim],
            tuple(shape[dim] for dim in dims),
            tuple(strides[dim] for dim in dims),
            ITEM,
            logical.index("B"),
        )
        for layer in range(sizes.layers)
    ]
    return DeviceKv(cuda, tensors, memory)


LAYOUTS: dict[str, Callable[[FakeCudart, Sizes], DeviceKv]] = {
    "split": lambda cuda, sizes: one_storage(cuda, sizes, "L2BNHC", by_layer=True),
    "packed LBHNC": lambda cuda, sizes: one_storage(cuda, sizes, "LBHNC", by_layer=True),
    "packed LBNHC": lambda cuda, sizes: one_storage(cuda, sizes, "LBNHC", by_layer=True),
    "heads outside LHBNC": lambda cuda, sizes: one_storage(cuda, sizes, "LHBNC", by_layer=True),
    "block-outermost BLHNC": lambda cuda, sizes: one_storage(cuda, sizes, "BLHNC", by_layer=True),
    "block-outermost BLNHC": lambda cuda, sizes: one_storage(cuda, sizes, "BLNHC", by_layer=True),
    "block-outermost BHLNC": lambda cuda, sizes: one_storage(cuda, sizes, "BHLNC", by_layer=True),
    "cross-layer tensor": lambda cuda, sizes: one_storage(cuda, sizes, "BL2NHC", by_layer=False),
    "MLA": lambda cuda, sizes: one_storage(cuda, sizes, "LBNC", by_layer=True),
}
