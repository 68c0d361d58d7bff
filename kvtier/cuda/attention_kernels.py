"""Launches of the kernels that compute: new KV into its place, and decode attention over it.

For an engine of ours, on its own stream. Everything is a plain number: addresses in device memory,
strides in bytes. What each kernel is given is told in kernels/README.md.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import astuple, dataclass
from math import e, log2
from typing import Literal

import numpy as np

from kvtier.cuda.device_layout import DeviceTensor
from kvtier.cuda.kernel_cache import KernelCache
from kvtier.cuda.runtime import (
    CudaRuntime,
    Direction,
    Function,
    KernelLaunch,
    Ranges,
    Stream,
)
from kvtier.errors import BadRequest

ElementName = Literal["bf16", "fp16"]
HEAD_SIZES = (64, 128)

_ELEMENT_BYTES = 2
_ATTENTION_THREADS = 128
_HEADS_TOGETHER = 4  # Query heads of a thread block, as in kernels/paged_attention.cuh.
_RECORD_HEAD = 4
_WORD_BYTES = 16
_WRITE_THREADS = 256
_WRITE_LANES = 16
# A thread block reads 32 rows in a round: of fewer than 8 rounds, merging would be most.
_SPLIT_TOKENS_MIN = 256
_SPLIT_COUNT_MAX = 32
_BLOCKS_PER_MULTIPROCESSOR = 3  # That fit, by their registers.


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Where the KV of a group of layers lies; the numbers of kernels/kv_core.cuh, in its order."""

    base: int
    layer_step: int
    block_step: int
    head_step: int
    token_step: int
    value_step: int
    block_count: int
    block_tokens: int
    head_count: int
    key_bytes: int
    value_bytes: int

    @property
    def head_size(self) -> int:
        return self.key_bytes // _ELEMENT_BYTES


def geometry_of(keys: DeviceTensor, values: DeviceTensor) -> KvGeometry:
    """From views [layer, block, head, token, element]. Raises BadRequest for what kernels cannot
    read in words of 16 bytes."""
    if len(keys.shape) != 5 or keys.shape != values.shape or keys.strides != values.strides:
        raise BadRequest("keys and values must be views alike, of five dimensions")
    layer_step, block_step, head_step, token_step, element_step = keys.strides
    if element_step != _ELEMENT_BYTES or keys.element_bytes != _ELEMENT_BYTES:
        raise BadRequest("kernels know elements of 16 bits, side by side")
    steps = (layer_step, block_step, head_step, token_step, values.address - keys.address)
    if any(number % _WORD_BYTES for number in (keys.address, *steps)):
        raise BadRequest("a row of keys or values does not start at a multiple of 16 bytes")
    if keys.shape[4] not in HEAD_SIZES:
        raise BadRequest(f"kernels know head sizes {HEAD_SIZES}, not {keys.shape[4]}")
    _, block_count, head_count, block_tokens, head_size = keys.shape
    row_bytes = _ELEMENT_BYTES * head_size
    return KvGeometry(
        keys.address, *steps, block_count, block_tokens, head_count, row_bytes, row_bytes
    )


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Of a step, [tokens, heads, head size]: a token's row every `*_step` bytes."""

    keys: int
    key_step: int
    values: int
    value_step: int
    places: int  # int64 for each token: block * block_tokens + token in it; negative for none.
    count: int


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One query for each request; tensors are contiguous."""

    out: int  # [requests, query heads, head size], as are the queries.
    queries: int
    tables: int  # int32 [requests, table_blocks]; 0: blocks of a request follow one another.
    table_blocks: int
    kv_counts: int  # int32 [requests]
    request_count: int
    kv_count_max: int  # No less than the largest of them.


def split_count_of(thread_blocks: int, kv_count_max: int, thread_blocks_max: int) -> int:
    """Into how many parts to cut tokens, so that few requests with long prefixes fill the GPU."""
    wanted = thread_blocks_max // thread_blocks
    return max(1, min(wanted, kv_count_max // _SPLIT_TOKENS_MIN, _SPLIT_COUNT_MAX))


class AttentionKernels:
    """For one group of layers; invariant: launches of one object are on one stream."""

    def __init__(
        self,
        runtime: CudaRuntime,
        cache: KernelCache,
        geometry: KvGeometry,
        *,
        element: ElementName,
        query_heads: int,
        device: int = 0,
    ) -> None:
        """Raises CudaUnavailable or CudaRefused, and then has kept nothing."""
        if query_heads % geometry.head_count:
            raise BadRequest(f"{query_heads} query heads cannot share {geometry.head_count}")
        runtime.use_device(device)
        attributes = runtime.attributes(device)
        self._runtime, self._geometry = runtime, geometry
        self._query_heads = query_heads
        self._multiprocessor_count = attributes.multiprocessor_count
        self._thread_blocks_max = attributes.multiprocessor_count * _BLOCKS_PER_MULTIPROCESSOR
        name = f"{element}_{geometry.head_size}"
        copies = cache.cubin("kv_copy", attributes.compute_capability)
        attention = cache.cubin("paged_attention", attributes.compute_capability)
        self._write: Function = runtime.load_function(copies, "write_kv")
        self._attend: Function = runtime.load_function(attention, f"paged_attention_{name}")
        self._merge: Function = runtime.load_function(attention, f"merge_splits_{name}")
        # Tokens are split only as far as thread blocks still find a place on the GPU.
        self._record_bytes = 4 * (_RECORD_HEAD + geometry.head_size)
        self._partials_bytes = self._record_bytes * _HEADS_TOGETHER * self._thread_blocks_max
        numbers = np.array(astuple(geometry), np.int64)
        with ExitStack() as held:
            self._numbers = runtime.allocate_device(numbers.nbytes)
            held.callback(runtime.free_device, self._numbers)
            self._partials = runtime.allocate_device(self._partials_bytes)
            held.callback(runtime.free_device, self._partials)
            stream = runtime.create_stream(runtime.priorities()[0])
            held.callback(runtime.destroy_stream, stream)
            runtime.copy(
                self._numbers,
                numbers.ctypes.data,
                numbers.nbytes,
                Direction.HOST_TO_DEVICE,
                stream,
            )
            runtime.synchronize_stream(stream)
            self._held = held.pop_all()

    def write(self, tokens: NewTokens, layer: int, written: Ranges, stream: Stream) -> None:
        """`written`: the rows, as far as the caller knows them."""
        if not tokens.count:
            return
        geometry = self._geometry
        rows = tokens.count * geometry.head_count * 2
        row_bytes = geometry.head_count * geometry.key_bytes
        key_bytes = (tokens.count - 1) * tokens.key_step + row_bytes
        value_bytes = (tokens.count - 1) * tokens.value_step + row_bytes
        self._runtime.launch(
            KernelLaunch(
                self._write,
                min(-(-rows * _WRITE_LANES // _WRITE_THREADS), 4 * self._multiprocessor_count),
                _WRITE_THREADS,
                [
                    *(tokens.keys, tokens.key_step, tokens.values, tokens.value_step),
                    *(tokens.places, tokens.count, self._numbers, layer),
                ],
                reads=Ranges.of(
                    (tokens.keys, key_bytes),
                    (tokens.values, value_bytes),
                    (tokens.places, 8 * tokens.count),
                    self._numbers_range,
                ),
                writes=written,
            ),
            stream,
        )

    def attend(self, step: DecodeStep, layer: int, read: Ranges, stream: Stream) -> None:
        """`read`: the rows of KV, as far as the caller knows them."""
        if not step.request_count:
            return
        geometry = self._geometry
        shared_by = self._query_heads // geometry.head_count
        thread_blocks = step.request_count * geometry.head_count * -(-shared_by // _HEADS_TOGETHER)
        split_count = split_count_of(thread_blocks, step.kv_count_max, self._thread_blocks_max)
        scale = int(np.float32(log2(e) / geometry.head_size**0.5).view(np.uint32))
        rows = step.request_count * self._query_heads
        out = (step.out, rows * geometry.key_bytes)
        partials = (self._partials, self._partials_bytes)
        is_split = split_count > 1
        if is_split:
            assert rows * split_count * self._record_bytes <= self._partials_bytes
        known = Ranges.of(
            (step.queries, rows * geometry.key_bytes),
            (step.kv_counts, 4 * step.request_count),
            self._numbers_range,
            *([(step.tables, 4 * step.request_count * step.table_blocks)] if step.tables else []),
        )
        self._runtime.launch(
            KernelLaunch(
                self._attend,
                thread_blocks * split_count,
                _ATTENTION_THREADS,
                [
                    *(step.out, step.queries, self._numbers, layer),
                    *(step.tables, step.table_blocks, step.kv_counts, step.request_count),
                    *(self._query_heads, scale, split_count, self._partials if is_split else 0),
                ],
                reads=Ranges(
                    np.append(known.starts, read.starts), np.append(known.sizes, read.sizes)
                ),
                writes=Ranges.of(partials if is_split else out),
            ),
            stream,
        )
        if is_split:
            self._runtime.launch(
                KernelLaunch(
                    self._merge,
                    -(-rows * 32 // _ATTENTION_THREADS),
                    _ATTENTION_THREADS,
                    [step.out, self._partials, rows, split_count],
                    reads=Ranges.of(partials),
                    writes=Ranges.of(out),
                ),
                stream,
            )

    def close(self) -> None:
        """When all that was launched has ended."""
        self._held.close()

    @property
    def _numbers_range(self) -> tuple[int, int]:
        return self._numbers, 8 * len(astuple(self._geometry))
