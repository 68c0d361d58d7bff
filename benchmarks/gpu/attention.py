"""Stage: decode attention over block tables against the same over contiguous KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.findings import Findings, gigabytes_per_second
from benchmarks.gpu.rig import Rig, Stopwatch
from kvtier.cuda.attention_kernels import AttentionKernels, DecodeStep, geometry_of
from kvtier.cuda.device_layout import DeviceTensor
from kvtier.cuda.runtime import Direction, Ranges

ELEMENT_BYTES = 2
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

    def room(self, length_bytes: int) -> int:
        address = self._rig.runtime.allocate_device(length_bytes)
        self._held.append(address)
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
    findings.claim("attention kernels can be compiled", rig.kernel_cache is not None)
    if rig.kernel_cache is None:
        return
    arena = _Arena(rig)
    rng = np.random.default_rng(5)
    kv = _random_kv(rng, sizes)
    contiguous = arena.put(kv)
    order = rng.permutation(sizes.block_count)
    paged = arena.room(sizes.kv_bytes)
    _scatter(rig, arena, (contiguous, paged), (order, sizes.block_bytes))
    queries = bf16_of(rng.standard_normal((sizes.requests, sizes.query_heads, sizes.width)))
    where = {"contiguous": (contiguous, 0), "paged": (paged, arena.put(order.astype(np.int32)))}
    counts = arena.put(np.full(sizes.requests, sizes.tokens, np.int32))
    asked, out = arena.put(queries), arena.room(queries.nbytes)
    watch = Stopwatch(rig, arena.stream)
    outs, seconds = {}, {}
    for name, (base, table) in where.items():
        kernels = _kernels_of(rig, base, sizes)
        step = DecodeStep(
            out, asked, table, sizes.table_blocks, counts, sizes.requests, sizes.tokens
        )
        read = Ranges.of((base, sizes.kv_bytes))

        def queue(
            kernels: AttentionKernels = kernels, step: DecodeStep = step, read: Ranges = read
        ) -> None:
            kernels.attend(step, 0, read, arena.stream)

        seconds[name] = watch.seconds(queue, repeat_count=sizes.repeat_count)
        outs[name] = arena.read(out, np.empty(queries.shape, np.uint16))
        kernels.close()
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


def _kernels_of(rig: Rig, base: int, sizes: Sizes) -> AttentionKernels:
    """A block: keys of its tokens, then values; of a token, head after head."""
    assert rig.kernel_cache is not None
    token_step = sizes.heads * sizes.row_bytes
    shape = (1, sizes.block_count, sizes.heads, sizes.block_tokens, sizes.width)
    strides = (sizes.kv_bytes, sizes.block_bytes, sizes.row_bytes, token_step, ELEMENT_BYTES)
    keys, values = (
        DeviceTensor(address, shape, strides, ELEMENT_BYTES, block_dim=1)
        for address in (base, base + sizes.block_tokens * token_step)
    )
    return AttentionKernels(
        rig.runtime,
        rig.kernel_cache,
        geometry_of(keys, values),
        element="bf16",
        query_heads=sizes.query_heads,
        device=rig.device,
    )


def _scatter(rig: Rig, arena: _Arena, bases: tuple[int, int], how: tuple[Array, int]) -> None:
    """Blocks in a row to where the tables say, within the device."""
    (source, target), (order, block_bytes) = bases, how
    for index, place in enumerate(order.tolist()):
        rig.runtime.copy(
            target + place * block_bytes,
            source + index * block_bytes,
            block_bytes,
            Direction.DEVICE_TO_DEVICE,
            arena.stream,
        )
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
