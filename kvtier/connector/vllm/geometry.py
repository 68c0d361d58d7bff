"""Where the bytes of a device block lie in vLLM's KV tensors, found from the tensors themselves.

vLLM has many layouts, and their names have changed: keys and values apart ([2, blocks, …]), side by
side in a block, or one latent for both; tokens before heads or after; one storage for all layers or
one for each; a block of the scheduler split into several of the kernel's. All that is needed of
them is the dimension that counts blocks. A block's bytes are those of its elements in the order of
memory, the remaining dimensions by their strides: so a block is copied in the fewest runs. That
order is part of the layout's name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from kvtier.connector.vllm.unsupported import Unsupported

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """One layer's tensor as whole numbers, device blocks first, and its place in a block."""

    blocks: torch.Tensor
    first_byte: int
    block_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockGeometry:
    """All layers; `layout` differs wherever equal bytes would mean something else."""

    planes: tuple[Plane, ...]
    block_count: int
    shard_bytes: int
    layout: str
    dtype: str


def geometry_of(kv_caches: Mapping[str, Any], block_count: int) -> BlockGeometry:
    """Raises Unsupported for tensors that are not understood."""
    if not kv_caches:
        raise Unsupported("kvtier: this model has no KV cache; run it without kvtier")
    tensors: dict[tuple[Any, ...], torch.Tensor] = {}
    layout, dtypes = hashlib.sha256(), set()
    for name in sorted(kv_caches, key=_layer_order):
        tensor, order = _in_memory_order(_blocks_first(name, kv_caches[name], block_count))
        layout.update(f"{tuple(tensor.shape[1:])} {order} {tensor.dtype}\n".encode())
        dtypes.add(str(tensor.dtype).removeprefix("torch."))
        # Layers that share their KV have the same tensor.
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        tensors.setdefault(place, tensor)
    sizes = [prod(t.shape[1:]) * t.element_size() for t in tensors.values()]
    shard_bytes = sum(sizes)
    planes, first_byte = [], 0
    for tensor, size in zip(tensors.values(), sizes, strict=True):
        blocks = _as_integers(_flat(tensor), first_byte, shard_bytes)
        planes.append(Plane(blocks, first_byte, size))
        first_byte += size
    form = tuple(next(iter(tensors.values())).shape[1:])
    return BlockGeometry(
        tuple(planes),
        block_count,
        shard_bytes,
        layout=f"{len(planes)} x {form} {layout.hexdigest()[:16]}",
        dtype="+".join(sorted(dtypes)),
    )


def _layer_order(name: str) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", name)], name


def _blocks_first(name: str, tensor: Any, block_count: int) -> torch.Tensor:
    """A view with dimensions [blocks, kernel blocks in a block, …]."""
    if not isinstance(tensor, torch.Tensor):
        raise Unsupported(
            f"kvtier: the state of layer {name} is {type(tensor).__name__}, not KV in blocks;"
            " run without kvtier"
        )
    fits = [dim for dim in (0, 1) if dim < tensor.dim() and _fits(tensor.shape[dim], block_count)]
    if not fits or (len(fits) == 2 and tensor.shape[0] == 2):
        raise Unsupported(
            f"kvtier: no dimension of layer {name}, {tuple(tensor.shape)}, surely counts its"
            f" {block_count} blocks; run without kvtier"
        )
    dim = fits[0]
    sizes = (block_count, int(tensor.shape[dim]) // block_count)
    split = torch.unflatten(tensor, dim, sizes)
    return split.movedim(dim, 0).movedim(dim + 1, 1)


def _in_memory_order(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The dimensions behind the first one from the outermost in memory to the innermost, and which
    they were. One of size 1 has no place in memory: it goes first, and is not told of."""
    dims, strides = range(1, tensor.dim()), list(tensor.stride())
    single = [dim for dim in dims if tensor.shape[dim] == 1]
    order = sorted((dim for dim in dims if tensor.shape[dim] > 1), key=lambda d: -strides[d])
    return tensor.permute(0, *single, *order), tuple(order)


def _fits(size: int, block_count: int) -> bool:
    return size > 0 and size % block_count == 0


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """[blocks, elements] where a block is one run of memory: the fastest to copy."""
    return tensor.flatten(1) if tensor[0].is_contiguous() else tensor


def _as_integers(tensor: torch.Tensor, first_byte: int, shard_bytes: int) -> torch.Tensor:
    """The same bytes as the widest whole numbers: fewer elements, and no dtype torch cannot index.

    The place in a slot must be aligned as well, where the copy has the same view of it.
    """
    size = tensor.element_size()
    for width in sorted(_INTEGERS, reverse=True):
        steps = [step * size for step in tensor.stride()[:-1]]
        ends = int(tensor.storage_offset()), int(tensor.shape[-1])
        steps += [*(end * size for end in ends), first_byte, shard_bytes]
        is_wider = width > size and tensor.stride(-1) == 1 and tensor.data_ptr() % width == 0
        if is_wider and all(step % width == 0 for step in steps):
            return tensor.view(_INTEGERS[width])
    if size not in _INTEGERS or first_byte % size or shard_bytes % size:
        raise Unsupported("kvtier: layers of unaligned element sizes; run without kvtier")
    return tensor.view(_INTEGERS[size])
