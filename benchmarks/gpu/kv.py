"""KV of an 8B model's shape in device memory, slots for it in a slab, and our copies between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from benchmarks.gpu.rig import Rig, StageLate, Stopwatch
from benchmarks.gpu.slabs import Slab
from kvtier.cuda.copy_submit import KernelCopies
from kvtier.cuda.device_layout import DeviceLayout, DeviceTensor, layout_of
from kvtier.cuda.registration import SlabRegistry
from kvtier.cuda.runtime import Direction, Stream
from kvtier.cuda.streams import CopyStreams, CopyTicket
from kvtier.memory import Bytes

ELEMENT_BYTES = 2  # bf16.
LOOK_SECONDS = 20e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """Of Llama-3-8B: a block of 16 tokens has 2 MiB, 512 of them are 8 K tokens."""

    layers: int = 32
    heads: int = 8
    width: int = 128
    block_tokens: int = 16
    block_count: int = 512

    @property
    def block_bytes(self) -> int:
        head_bytes = self.block_tokens * self.width * ELEMENT_BYTES
        return 2 * self.layers * self.heads * head_bytes


# The dimensions of one tensor from the outermost in memory; B counts blocks. L: all layers in one
# tensor; without it there is a tensor for each layer.
BLOCKS_OUTSIDE = "BL2NHC"  # One run a block.
VLLM = "2BNHC"  # Two runs a layer.
HEADS_OUTSIDE = "2HBNC"  # Short runs: two for each layer and head.


class Kv:
    """Device blocks, as many slots, and streams between them."""

    def __init__(
        self,
        rig: Rig,
        shape: Shape,
        order: str,
        *,
        kernels: KernelCopies | None = None,
        may_store: Callable[[int], bool] = lambda _: True,
    ) -> None:
        runtime = rig.runtime
        self.rig, self.shape = rig, shape
        self.length_bytes = shape.block_bytes * shape.block_count
        self.address = runtime.allocate_device(self.length_bytes)
        self.layout: DeviceLayout = layout_of(_tensors(shape, order, self.address))
        assert self.layout.shard_bytes == shape.block_bytes
        self.slab = Slab(self.length_bytes)
        self.registry = SlabRegistry(runtime)
        self.registry.add(self.slab.address, self.slab.length_bytes)
        # A worker pins it before it is needed, at a low rate.
        self.registry.warm(rig.now())
        self.compute = runtime.create_stream(runtime.priorities()[0])
        self.streams = CopyStreams(runtime, self.registry, kernels=kernels, may_store=may_store)
        self.blocks = list(range(shape.block_count))

    def slots_of(self, blocks: Sequence[int]) -> list[int]:
        return [self.slab.address + block * self.shape.block_bytes for block in blocks]

    def offload(self, blocks: Sequence[int]) -> CopyTicket:
        mark = self.streams.mark(self.compute)
        return self.streams.offload(self.layout, blocks, self.slots_of(blocks), mark)

    def onboard(self, blocks: Sequence[int]) -> CopyTicket:
        mark = self.streams.mark(self.compute)
        return self.streams.onboard(self.layout, blocks, self.slots_of(blocks), mark)

    def finish(self) -> list[CopyTicket]:
        """Poll until nothing is left. Raises StageLate."""
        ended = self.streams.poll()
        while not self.streams.is_idle:
            if self.rig.is_late():
                raise StageLate("copies do not end in the stage's time")
            self.rig.rest(LOOK_SECONDS)
            ended += self.streams.poll()
        return ended

    def seconds_of(self, *ask: Callable[[], CopyTicket]) -> float:
        """From asking until all have ended, submitting included; fails if a copy fails."""
        start = self.rig.now()
        for one in ask:
            one()
        for ticket in self.finish():
            if ticket.failed is not None:
                raise ticket.failed
        return self.rig.now() - start

    def fill_device(self, seed: int) -> None:
        """Random bytes in every device block, by one plain copy; slots hold the same."""
        self.slab.array[: self.length_bytes] = random_bytes(seed, self.length_bytes)
        self._copy_all(self.address, self.slab.address, Direction.HOST_TO_DEVICE)

    def device_bytes(self) -> Bytes:
        """All device memory, by one plain copy, which is not what is being tested."""
        into = np.empty(self.length_bytes, np.uint8)
        self._copy_all(int(into.ctypes.data), self.address, Direction.DEVICE_TO_HOST)
        return into

    def close(self) -> None:
        self.streams.close()
        self.registry.close()
        self.rig.runtime.destroy_stream(self.compute)
        self.rig.runtime.free_device(self.address)
        self.slab.close()

    def _copy_all(self, target: int, source: int, direction: Direction) -> None:
        runtime = self.rig.runtime
        runtime.copy(target, source, self.length_bytes, direction, self.compute)
        runtime.synchronize_stream(self.compute)


def random_bytes(seed: int, length_bytes: int) -> Bytes:
    words = np.random.default_rng(seed).integers(0, 1 << 64, -(-length_bytes // 8), np.uint64)
    return words.view(np.uint8)[:length_bytes]


def best_copy_seconds(
    rig: Rig, device: int, host: int, length_bytes: int, repeat_count: int = 5
) -> dict[Direction, float]:
    """What the link can do: one plain copy of pinned memory, the fastest of several."""
    runtime = rig.runtime
    stream: Stream = runtime.create_stream(runtime.priorities()[0])
    watch = Stopwatch(rig, stream)
    found = {}
    for direction in (Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST):
        is_up = direction is Direction.HOST_TO_DEVICE
        target, source = (device, host) if is_up else (host, device)

        def queue(target: int = target, source: int = source, way: Direction = direction) -> None:
            runtime.copy(target, source, length_bytes, way, stream)

        found[direction] = min(watch.seconds(queue, repeat_count=1) for _ in range(repeat_count))
    watch.close()
    runtime.destroy_stream(stream)
    return found


def _tensors(shape: Shape, order: str, address: int) -> list[DeviceTensor]:
    """In device memory without a gap, for each layer where no dimension counts layers."""
    counts = {
        "L": shape.layers,
        "B": shape.block_count,
        "2": 2,
        "N": shape.block_tokens,
        "H": shape.heads,
        "C": shape.width,
    }
    dims = tuple(counts[letter] for letter in order)
    strides = tuple(ELEMENT_BYTES * prod(dims[place + 1 :]) for place in range(len(dims)))
    tensor_bytes = ELEMENT_BYTES * prod(dims)
    return [
        DeviceTensor(address + index * tensor_bytes, dims, strides, ELEMENT_BYTES, order.index("B"))
        for index in range(1 if "L" in order else shape.layers)
    ]
