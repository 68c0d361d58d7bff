"""Stage: decode attention over block tables against the same over contiguous KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.findings import Findings, gigabytes_per_second
from benchmarks.gpu.rig import Rig, Stopwatch
from kvtier.cuda.runtime import Direction, KernelLaunch, Ranges, SourceOrder

ELEMENT_BYTES = 2
RECORD_FLOATS = 4  # Before the weighted values; see kernels/paged_attention.cuh.
THREADS = 128
# Of the outputs as a whole against float64.
RELATIVE = 2e-3
_CHECKED_REQUESTS = 2

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """A decode step of one layer of Llama-3-8B: 1 GiB of KV."""

    requests: int = 64
    tokens: int = 4096
    query_heads: int = 32
    heads: int = 8
    width: int = 128
    block_tokens: int = 16
    split_count: int = 4
    repeat_count: int = 15

    @property
    def row_bytes(self) -> int:
        return self.width * ELEMENT_BYTES

    @property
    def block_bytes(self) -> int:
        return 2 * self.block_tokens * self.heads * self.row_bytes

    @property
    def table_blocks(self) -> int:
        return self.tokens // self.block_tokens

    @property
    def block_count(self) -> int:
        return self.requests * self.table_blocks

    @property
    def kv_bytes(self) -> int:
        return self.block_count * self.block_bytes


class _Arena:
    """Device memory that goes with the stage, and what is put into it."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._held: list[int] = []
        self.stream = rig.runtime.create_stream(rig.runtime.priorities()[1])
        self.sizes: dict[int, int] = {}

    def room(self, length_bytes: int) -> int:
        address = self._rig.runtime.allocate_device(length_bytes)
        self._held.append(address)
        self.sizes[address] = length_bytes
        return address

    def put(self, array: Array) -> int:
        address = self.room(array.nbytes)
        host = np.ascontiguousarray(array)
        self._copy(address, host.ctypes.data, host.nbytes, Direction.HOST_TO_DEVICE)
        return address

    def read(self, address: int, array: Array) -> Array:
        self._copy(array.ctypes.data, address, array.nbytes, Direction.DEVICE_TO_HOST)
        return array

    def close(self) -> None:
        for address in self._held:
            self._rig.runtime.free_device(address)
        self._rig.runtime.destroy_stream(self.stream)

    def _copy(self, target: int, source: int, length_bytes: int, direction: Direction) -> None:
        self._rig.runtime.copy(target, source, length_bytes, direction, self.stream)
        self._rig.runtime.synchronize_stream(self.stream)


def measure(rig: Rig, findings: Findings, sizes: Sizes = Sizes()) -> None:
    arena = _Arena(rig)
    rng = np.random.default_rng(5)
    kv = _random_kv(rng, sizes)
    contiguous = arena.put(kv)
    order = rng.permutation(sizes.block_count)
    paged = arena.room(sizes.kv_bytes)
    _scatter(rig, arena, (contiguous, paged), (order, sizes.block_bytes))
    queries = bf16_of(rng.standard_normal((sizes.requests, sizes.query_heads, sizes.width)))
    tables = order.astype(np.int32).reshape(sizes.requests, sizes.table_blocks)
    where = {"contiguous": (contiguous, 0), "paged": (paged, arena.put(tables))}
    watch, calls = Stopwatch(rig, arena.stream), _Calls(rig, arena, queries, sizes)
    outs, seconds = {}, {}
    for name, (base, table) in where.items():
        call = calls.make(base, table)
        seconds[name] = watch.seconds(call.queue, repeat_count=sizes.repeat_count)
        outs[name] = arena.read(call.out, np.empty(queries.shape, np.uint16))
        findings.note(
            f"{name}_attention_gigabytes_per_second",
            gigabytes_per_second(sizes.kv_bytes, seconds[name]),
        )
        findings.note(f"{name}_attention_seconds", round(seconds[name], 7))
    findings.note("paged_to_contiguous", round(seconds["paged"] / seconds["contiguous"], 4))
    findings.claim(
        "paged attention gives the bytes of contiguous attention",
        bool((outs["paged"] == outs["contiguous"]).all()),
    )
    expected = reference(kv, queries[:_CHECKED_REQUESTS], sizes)
    found = float64_of(outs["paged"][:_CHECKED_REQUESTS])
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    findings.note("relative_error_to_float64", float(f"{error:.3g}"))
    findings.claim(f"attention is within {RELATIVE} of float64", error <= RELATIVE)
    watch.close()
    arena.close()


@dataclass(frozen=True, slots=True)
class _Call:
    rig: Rig
    arena: _Arena
    launches: Sequence[KernelLaunch]
    out: int

    def queue(self) -> None:
        for launch in self.launches:
            self.rig.runtime.launch(launch, self.arena.stream)


class _Calls:
    """One step's launches over KV at any address, through a table or without."""

    def __init__(self, rig: Rig, arena: _Arena, queries: Array, sizes: Sizes) -> None:
        self._rig, self._arena, self._sizes = rig, arena, sizes
        image, suffix = rig.cubin("paged_attention"), f"bf16_{sizes.width}"
        self._attend = rig.runtime.load_function(image, f"paged_attention_{suffix}")
        self._merge = rig.runtime.load_function(image, f"merge_splits_{suffix}")
        self._queries = arena.put(queries)
        self._counts = arena.put(np.full(sizes.requests, sizes.tokens, np.int32))
        record_bytes = 4 * (RECORD_FLOATS + sizes.width)
        self._rows = sizes.requests * sizes.query_heads
        self._partials = arena.room(self._rows * sizes.split_count * record_bytes)

    def make(self, base: int, table: int) -> _Call:
        sizes, arena = self._sizes, self._arena
        geometry = arena.put(_geometry(base, sizes))
        out = arena.room(arena.sizes[self._queries])
        scale = int(np.float32(sizes.width**-0.5 * log2(np.e)).view(np.uint32))
        is_split = sizes.split_count > 1
        read = [base, geometry, self._queries, self._counts, *([table] if table else [])]
        attend = KernelLaunch(
            self._attend,
            sizes.requests
            * sizes.heads
            * -(-sizes.query_heads // sizes.heads // 4)
            * sizes.split_count,
            THREADS,
            [
                *(out, self._queries, geometry, 0, table, sizes.table_blocks, self._counts),
                *(sizes.requests, sizes.query_heads, scale, sizes.split_count),
                self._partials if is_split else 0,
            ],
            reads=self._ranges(read),
            writes=self._ranges([out, self._partials]),
        )
        merge = KernelLaunch(
            self._merge,
            -(-self._rows * 32 // THREADS),
            THREADS,
            [out, self._partials, self._rows, sizes.split_count],
            reads=self._ranges([self._partials]),
            writes=self._ranges([out]),
        )
        return _Call(self._rig, arena, [attend, merge] if is_split else [attend], out)

    def _ranges(self, addresses: Sequence[int]) -> Ranges:
        return Ranges.of(*((address, self._arena.sizes[address]) for address in addresses))


def _geometry(base: int, sizes: Sizes) -> Array:
    """A block: keys of its tokens, then values; of a token, head after head."""
    token_step = sizes.heads * sizes.row_bytes
    steps = (0, sizes.block_bytes, sizes.row_bytes, token_step, sizes.block_tokens * token_step)
    counts = (sizes.block_count, sizes.block_tokens, sizes.heads)
    return np.array([base, *steps, *counts, sizes.row_bytes, sizes.row_bytes], np.int64)


def _scatter(rig: Rig, arena: _Arena, bases: tuple[int, int], how: tuple[Array, int]) -> None:
    """Blocks in a row to where the tables say, within the device."""
    (source, target), (order, block_bytes) = bases, how
    step = np.uint64(block_bytes)
    sources = np.arange(len(order), dtype=np.uint64) * step + np.uint64(source)
    targets = order.astype(np.uint64) * step + np.uint64(target)
    if rig.runtime.has_batches:
        lengths = np.full(len(order), step, np.uint64)
        rig.runtime.copy_batch(targets, sources, lengths, SourceOrder.STREAM, arena.stream)
    else:
        for one, other in zip(targets.tolist(), sources.tolist(), strict=True):
            rig.runtime.copy(one, other, block_bytes, Direction.DEVICE_TO_DEVICE, arena.stream)
    rig.runtime.synchronize_stream(arena.stream)


def _random_kv(rng: np.random.Generator, sizes: Sizes) -> Array:
    """[block, key or value, token, head, element]; random numbers of an odd period, repeated."""
    count = sizes.kv_bytes // ELEMENT_BYTES
    some = bf16_of(rng.standard_normal(min(count, (8 << 20) - 1)))
    shape = (sizes.block_count, 2, sizes.block_tokens, sizes.heads, sizes.width)
    return np.resize(some, count).reshape(shape)


def reference(kv: Array, queries: Array, sizes: Sizes) -> Array:
    """Of the first requests, whose blocks follow one another in `kv`, in float64."""
    out = np.zeros(queries.shape)
    shared_by = sizes.query_heads // sizes.heads
    for request, heads in enumerate(queries):
        blocks = kv[request * sizes.table_blocks :][: sizes.table_blocks]
        keys, values = (
            float64_of(blocks[:, side]).reshape(sizes.tokens, sizes.heads, sizes.width)
            for side in range(2)
        )
        for head, query in enumerate(heads):
            scores = keys[:, head // shared_by] @ float64_of(query) * sizes.width**-0.5
            weights = np.exp(scores - scores.max())
            out[request, head] = weights @ values[:, head // shared_by] / weights.sum()
    return out


def bf16_of(values: Array) -> Array:
    """Cut off, not rounded: any number will do here."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def float64_of(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
