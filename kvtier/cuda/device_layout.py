"""Where the bytes of a device block lie in the engine's KV tensors, as runs of bytes.

Engines have many layouts: keys and values apart, side by side in a block, or one latent for both;
heads outside of tokens or inside; blocks outermost with all layers in a row, or one tensor for each
layer. All that is taken from them is shape and strides, never a name or a version. In a slot, a
block's bytes stand tensor after tensor, each in the order of its dimensions without the one that
counts blocks. That is a layout's promise to other processes, so it must not depend on the strides,
unless these are part of the namespace (`in_memory_order`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.cuda.runtime import Addresses
from kvtier.errors import BadRequest

# Of one block: heads outside of blocks give layers x heads. More would be a run for each token,
# which no path copies at a useful speed.
RUN_COUNT_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """A tensor in device memory; strides are in bytes, and one dimension counts blocks."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int
    block_dim: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLayout:
    """The runs of one block, in the order of a slot; block b's run lies `b * step` further on."""

    addresses: Addresses  # Of block 0.
    steps: Addresses
    sizes: Addresses
    places: Addresses  # In a slot.
    block_count: int

    @property
    def shard_bytes(self) -> int:
        return int(self.sizes.sum())

    def by_layer(self, layer_count: int) -> list[DeviceLayout]:
        """In so many parts of equal size, in the order of a slot; runs are cut where layers meet.

        Raises BadRequest for a block that has no such parts.
        """
        layer_bytes, rest = divmod(self.shard_bytes, layer_count)
        if rest:
            raise BadRequest(f"{self.shard_bytes} bytes are not {layer_count} layers of one size")
        parts = []
        ends = self.places + self.sizes
        for layer in range(layer_count):
            first, last = (np.uint64(layer_bytes * index) for index in (layer, layer + 1))
            is_in = (self.places < last) & (ends > first)
            starts: Addresses = np.maximum(self.places[is_in], first)
            sizes: Addresses = np.minimum(ends[is_in], last) - starts
            addresses: Addresses = self.addresses[is_in] + (starts - self.places[is_in])
            parts.append(
                DeviceLayout(addresses, self.steps[is_in], sizes, starts, self.block_count)
            )
        return parts

    def part(self, first_run: int, last_run: int) -> DeviceLayout:
        """Some of the runs, with their places: a layer or several, for loads by layer."""
        part = slice(first_run, last_run)
        return DeviceLayout(
            self.addresses[part],
            self.steps[part],
            self.sizes[part],
            self.places[part],
            self.block_count,
        )


def layout_of(tensors: Sequence[DeviceTensor]) -> DeviceLayout:
    """Raises BadRequest for tensors that are not understood: better no copy than a wrong one."""
    if not tensors:
        raise BadRequest("a layout needs a tensor")
    block_counts = {tensor.shape[tensor.block_dim] for tensor in tensors}
    if len(block_counts) != 1:
        raise BadRequest(f"tensors of {sorted(block_counts)} blocks cannot share their numbers")
    columns = [_runs_of(tensor) for tensor in tensors]
    addresses, steps, sizes = (
        np.concatenate([column[index] for column in columns]) for index in range(3)
    )
    places = np.cumsum(sizes, dtype=np.uint64) - sizes
    layout = _merged(DeviceLayout(addresses, steps, sizes, places, block_count=block_counts.pop()))
    if len(layout.sizes) > RUN_COUNT_MAX:
        raise BadRequest(f"a block lies in {len(layout.sizes)} runs: at most {RUN_COUNT_MAX}")
    _check_disjoint(layout)
    return layout


def dims_by_stride(tensor: DeviceTensor) -> tuple[int, ...]:
    """The dimensions from the outermost in memory to the innermost."""
    order = sorted(range(len(tensor.shape)), key=lambda dim: -tensor.strides[dim])
    return tuple(order)


def in_memory_order(tensor: DeviceTensor) -> DeviceTensor:
    """The same tensor with its dimensions by stride, so that a block lies in the fewest runs.

    Tokens outside of heads, seen as heads outside of tokens, would be a run for each token and
    head. A slot's bytes then follow the strides: `dims_by_stride` must be part of the namespace.
    """
    order = dims_by_stride(tensor)
    return DeviceTensor(
        tensor.address,
        tuple(tensor.shape[dim] for dim in order),
        tuple(tensor.strides[dim] for dim in order),
        tensor.element_bytes,
        order.index(tensor.block_dim),
    )


def _runs_of(tensor: DeviceTensor) -> tuple[Addresses, Addresses, Addresses]:
    """(addresses, steps, sizes) of the runs of block 0."""
    if not len(tensor.shape) == len(tensor.strides) > tensor.block_dim >= 0:
        raise BadRequest("shape, strides and block dimension do not fit")
    if min(tensor.shape) < 1 or min(tensor.strides) < 1 or tensor.element_bytes < 1:
        raise BadRequest(f"strides {tensor.strides} of shape {tensor.shape} are not understood")
    dims = [
        (size, stride)
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.strides, strict=True))
        if dim != tensor.block_dim and size > 1
    ]
    run_bytes = tensor.element_bytes
    while dims and dims[-1][1] == run_bytes:
        run_bytes *= dims.pop()[0]
    addresses = np.array([tensor.address], np.uint64)
    for size, stride in dims:
        steps = np.arange(size, dtype=np.uint64) * np.uint64(stride)
        addresses = (addresses[:, None] + steps[None, :]).ravel()
        if len(addresses) > RUN_COUNT_MAX:
            raise BadRequest(f"a block lies in more than {RUN_COUNT_MAX} runs")
    step = tensor.strides[tensor.block_dim]
    return addresses, np.full_like(addresses, step), np.full_like(addresses, run_bytes)


def _merged(layout: DeviceLayout) -> DeviceLayout:
    """Runs that follow one another on the device as they do in a slot are one: all layers of a
    block in a row, given as a tensor for each layer."""
    ends = layout.addresses + layout.sizes
    is_first = np.ones(len(ends), bool)
    is_first[1:] = (layout.addresses[1:] != ends[:-1]) | (layout.steps[1:] != layout.steps[:-1])
    firsts = np.flatnonzero(is_first)
    return DeviceLayout(
        layout.addresses[firsts],
        layout.steps[firsts],
        np.add.reduceat(layout.sizes, firsts),
        layout.places[firsts],
        layout.block_count,
    )


def _check_disjoint(layout: DeviceLayout) -> None:
    """Of the first blocks and the last: strides repeat, and so would an overlap."""
    blocks = np.unique(np.array([0, 1, 2, layout.block_count - 1], np.uint64))
    blocks = blocks[blocks < layout.block_count]
    starts = (layout.addresses[None, :] + blocks[:, None] * layout.steps[None, :]).ravel()
    ends = starts + np.tile(layout.sizes, len(blocks))
    order = np.argsort(starts)
    if bool((starts[order][1:] < ends[order][:-1]).any()):
        raise BadRequest("two blocks of this layout share bytes")
