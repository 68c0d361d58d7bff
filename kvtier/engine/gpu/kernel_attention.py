"""KV writes and decode attention by kvtier's kernels; attention of prompts by torch.

A decode reads all KV of its request for one token: that is what a kernel over block tables is for.
The queries of a prompt share what they read, so it is gathered once and torch's attention is used.

At an engine's start the kernels compute a few tokens beside torch: kernels that give other numbers
are not used. A kernel that faults takes the process's CUDA with it; KVTIER_KERNELS=0 does without.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvtier.cuda.attention_kernels import (
    AttentionKernels,
    DecodeStep,
    ElementName,
    KvGeometry,
    NewTokens,
    geometry_of,
)
from kvtier.cuda.device_layout import DeviceTensor
from kvtier.cuda.errors import CudaBroken, CudaRefused, CudaUnavailable
from kvtier.cuda.kernel_cache import KernelCache, KernelCompiler, default_folder
from kvtier.cuda.kernel_copies import KERNELS_VARIABLE
from kvtier.cuda.runtime import CudaRuntime, Ranges, Stream
from kvtier.engine.attention import (
    Attention,
    AttentionPlan,
    DecodeBatch,
    TorchAttention,
    attend_run,
    plan_attention,
)
from kvtier.engine.model import LlamaModel
from kvtier.errors import BadRequest

log = logging.getLogger(__name__)

_ELEMENTS: dict[torch.dtype, ElementName] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Of both ways the difference, to the largest number: bf16 has 8 bits, and sums differ in order.
_RELATIVE = 2e-2
_TRIED_TOKENS = 5


class Kernels(Protocol):
    """See AttentionKernels."""

    def write(self, tokens: NewTokens, layer: int, written: Ranges, stream: Stream) -> None: ...

    def attend(self, step: DecodeStep, layer: int, read: Ranges, stream: Stream) -> None: ...


class KernelDevice(Protocol):
    """What must be known of the engine's device."""

    model: LlamaModel
    kv_cache: Tensor

    @property
    def runtime(self) -> CudaRuntime: ...

    @property
    def index(self) -> int: ...

    def stream(self) -> Stream: ...

    def address_of(self, tensor: Tensor) -> int: ...


class KernelAttention:
    """Launches on the stream that torch computes on, so nothing else orders them.

    Tensors that a launch uses are torch's: their memory is given to later work of the same stream
    only, so that they may be dropped as soon as it is queued.
    """

    def __init__(self, device: KernelDevice, kernels: Kernels) -> None:
        self._device = device
        self._kernels = kernels
        self._kv_cache = device.kv_cache
        self._block_tokens = device.kv_cache.shape[3]
        whole = device.kv_cache.numel() * device.kv_cache.element_size()
        self._whole = Ranges.of((device.address_of(device.kv_cache), whole))
        self._plan: AttentionPlan | None = None  # Of this step; the rest is made for it.
        self._places = self._tables = self._kv_counts = torch.empty(0)

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: AttentionPlan) -> None:
        self._enter(plan)
        address_of = self._device.address_of
        tokens = NewTokens(
            keys=address_of(keys),
            key_step=_row_step(keys),
            values=address_of(values),
            value_step=_row_step(values),
            places=address_of(self._places),
            count=len(keys),
        )
        self._kernels.write(tokens, layer, self._whole, self._device.stream())

    def attend(self, layer: int, queries: Tensor, plan: AttentionPlan) -> Tensor:
        self._enter(plan)
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for run in plan.prefills:
            rows = slice(run.start, run.start + run.count)
            out[rows] = attend_run(queries[rows], self._kv_cache[:, layer], run)
        if plan.decodes is not None:
            out[plan.decodes.rows] = self._decode(layer, queries, plan.decodes)
        return out

    def _decode(self, layer: int, queries: Tensor, batch: DecodeBatch) -> Tensor:
        asked = queries.index_select(0, batch.rows)  # Contiguous.
        out = torch.empty_like(asked)
        address_of = self._device.address_of
        step = DecodeStep(
            out=address_of(out),
            queries=address_of(asked),
            tables=address_of(self._tables),
            table_blocks=batch.tables.shape[1],
            kv_counts=address_of(self._kv_counts),
            request_count=len(asked),
            kv_count_max=batch.kv_count_max,
        )
        self._kernels.attend(step, layer, self._whole, self._device.stream())
        return out

    def _enter(self, plan: AttentionPlan) -> None:
        """The numbers of a step as kernels read them, once for all layers."""
        if plan is self._plan:
            return
        self._plan = plan
        self._places = plan.write_blocks * self._block_tokens + plan.write_offsets
        if plan.decodes is not None:
            self._tables = plan.decodes.tables.to(torch.int32)
            self._kv_counts = plan.decodes.kv_counts.to(torch.int32)


def find_attention(device: KernelDevice, make_compiler: Callable[[], KernelCompiler]) -> Attention:
    """By kernels where they can be had and are right, else by torch, with the reason in the log."""
    by_torch = TorchAttention(device.kv_cache)
    if os.environ.get(KERNELS_VARIABLE) == "0":
        return by_torch
    try:
        kernels = _load(device, make_compiler)
    except CudaBroken:
        raise
    except (BadRequest, CudaRefused, CudaUnavailable) as error:
        log.warning("attention by torch, without kernels of ours: %s", error)
        return by_torch
    by_kernels = KernelAttention(device, kernels)
    if not are_alike(device, by_kernels, by_torch):
        log.error("attention by torch: kernels of ours give other numbers on this GPU")
        return by_torch
    return by_kernels


def _load(device: KernelDevice, make_compiler: Callable[[], KernelCompiler]) -> AttentionKernels:
    kv_cache = device.kv_cache
    if kv_cache.dtype not in _ELEMENTS:
        raise BadRequest(f"kernels know bf16 and fp16, not {kv_cache.dtype}")
    return AttentionKernels(
        device.runtime,
        KernelCache(default_folder(), make_compiler()),
        engine_geometry(kv_cache, device.address_of(kv_cache)),
        element=_ELEMENTS[kv_cache.dtype],
        query_heads=device.model.config.head_count,
        device=device.index,
    )


def engine_geometry(kv_cache: Tensor, address: int) -> KvGeometry:
    """Raises BadRequest for what kernels cannot read."""
    size = kv_cache.element_size()
    keys, values = (kv_cache[:, :, side].permute(1, 0, 3, 2, 4) for side in range(2))
    tensors = (
        DeviceTensor(
            address + view.data_ptr() - kv_cache.data_ptr(),
            tuple(view.shape),
            tuple(size * stride for stride in view.stride()),
            size,
            block_dim=1,
        )
        for view in (keys, values)
    )
    return geometry_of(*tensors)


@torch.inference_mode()
def are_alike(device: KernelDevice, one: Attention, other: Attention) -> bool:
    """Whether both write the same KV and compute about the same; waits for the device.

    For an engine that holds no KV yet: it is zeroed again.
    """
    kv_cache, config = device.kv_cache, device.model.config
    block_tokens, place = kv_cache.shape[3], kv_cache.device
    layer = kv_cache.shape[1] - 1
    token_count = min(_TRIED_TOKENS, block_tokens * len(kv_cache))
    # Drawn anew: in memory that nobody wrote to an earlier trial's right result may lie.
    generator = torch.Generator()
    generator.seed()

    def some(head_count: int) -> Tensor:
        drawn = torch.randn(token_count, head_count, config.head_size, generator=generator)
        return drawn.to(place, kv_cache.dtype)

    keys, values = some(config.kv_head_count), some(config.kv_head_count)
    queries = some(config.head_count)[-1:]
    block_count = -(-token_count // block_tokens)
    table = list(range(len(kv_cache) - block_count, len(kv_cache)))

    def put(columns: Sequence[Tensor]) -> list[Tensor]:
        return [column.to(place) for column in columns]

    written = plan_attention([table], [(0, token_count)], block_tokens, put)
    last = plan_attention([table], [(token_count - 1, token_count)], block_tokens, put)
    found = []
    for attention in (one, other):
        kv_cache[table] = 0
        attention.write(layer, keys, values, written)
        found.append((kv_cache[table].clone(), attention.attend(layer, queries, last).float()))
    kv_cache[table] = 0
    (kv, out), (other_kv, other_out) = found
    allowed = _RELATIVE * float(other_out.abs().max())
    return torch.equal(kv, other_kv) and float((out - other_out).abs().max()) <= allowed


def _row_step(rows: Tensor) -> int:
    """Bytes from one token's row to the next; heads and elements must lie in a row."""
    assert rows.stride()[1:] == (rows.shape[2], 1), "a token's heads do not follow one another"
    return rows.stride(0) * rows.element_size()
