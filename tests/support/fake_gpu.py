"""The reference engine's device on a fake GPU: computing runs late, and says what it touches.

The KV tensor is a view of the fake's device memory. Each part of a step is a launch on a fake
stream: its torch code runs when the fake's time comes to it, so an order that no event ensures
becomes wrong tokens, and the race checker, which is told of the KV that each layer reads and
writes, finds it whatever the timing was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtier.cuda.fake import FakeCudart
from kvtier.cuda.runtime import Ranges, Stream
from kvtier.engine.attention import AttentionPlan
from kvtier.engine.config import EngineConfig
from kvtier.engine.gpu.gpu_device import GpuDevice
from kvtier.engine.kv_cache import block_bytes, columns_of, copy_blocks
from kvtier.engine.model import LlamaModel

if TYPE_CHECKING:
    from kvtier.connector.stream_copying import DeviceBlocks

Part = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ComputeCosts:
    """Virtual seconds, where no seed draws them."""

    part_seconds: float = 10e-6
    layer_seconds: float = 30e-6
    look_seconds: float = 2e-6  # Between two looks at whether the step has been computed.


class FakeGpu(GpuDevice):
    """Its host thread is the engine's; `meanwhile` is what others do while that waits."""

    def __init__(
        self,
        model: LlamaModel,
        config: EngineConfig,
        *,
        seed: int | None = None,
        cuda: FakeCudart | None = None,
        costs: ComputeCosts = ComputeCosts(),
    ) -> None:
        self.seed = seed
        self.cuda = cuda or FakeCudart(seed=seed)
        self.compute = self.cuda.create_stream(0)
        self.costs = costs
        self.meanwhile: Callable[[], object] = lambda: None
        self.before_launch: Callable[[], object] = lambda: None
        self.read_count = 0  # Of results: what a step may wait for.
        super().__init__(model, config, self.cuda, torch.device("cpu"))

    def stream(self) -> Stream:
        return self.compute

    def address_of(self, tensor: torch.Tensor) -> int:
        assert tensor is self.kv_cache, "nothing else is in the fake's memory"
        return self._address

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self.before_launch()
        reads, writes = (
            Ranges.of(*((self._address + b * self._block_bytes, self._block_bytes) for b in column))
            for column in zip(*copies, strict=True)
        )
        self.cuda.compute(
            self.compute,
            self.costs.part_seconds,
            reads=reads,
            writes=writes,
            effect=partial(copy_blocks, self.kv_cache, *columns_of(copies)),
            name="copy on write",
        )

    def launch(self, part: Part) -> None:
        self.before_launch()
        self.cuda.compute(self.compute, self.costs.part_seconds, effect=part, name="part")

    def launch_layer(self, part: Part, layer: int, plan: AttentionPlan) -> None:
        self.before_launch()
        self.cuda.compute(
            self.compute,
            self.costs.layer_seconds,
            reads=self.read_ranges(layer, plan),
            writes=self.written_ranges(layer, plan),
            effect=part,
            name=f"layer {layer}",
        )

    def wait_computed(self) -> None:
        """As torch does for the tokens: no call of ours, so the fake counts no synchronisation."""
        self.read_count += 1
        done = self.cuda.create_event()
        self.cuda.record_event(done, self.compute)
        for _ in range(1_000_000):
            if self.cuda.is_event_done(done):
                self.cuda.destroy_event(done)
                return
            self.meanwhile()
            # Chance makes things last up to a millisecond.
            is_even = self.cuda.timeline.is_even
            self.cuda.advance(self.costs.look_seconds if is_even else 100e-6)
        raise AssertionError("the step never ends")

    def look_at(self, block: int, see: Callable[[np.ndarray], None]) -> None:
        """What the block holds when all that was launched before has been computed."""
        self.cuda.compute(
            self.compute,
            1e-6,
            reads=Ranges.of((self._address + block * self._block_bytes, self._block_bytes)),
            effect=lambda: see(self.bytes_of(block).copy()),
            name="a look",
        )

    def bytes_of(self, block: int) -> np.ndarray:
        """At this moment."""
        return self.cuda.device_bytes(self._address + block * self._block_bytes, self._block_bytes)

    def read_ranges(self, layer: int, plan: AttentionPlan) -> Ranges:
        """The layer of every block that attention looks at, whole."""
        tables = [run.table for run in plan.prefills]
        if plan.decodes is not None:
            tables.append(plan.decodes.tables.flatten())
        blocks = np.unique(torch.cat(tables).numpy()).astype(np.uint64)
        starts = np.uint64(self._layer_address(layer)) + blocks * np.uint64(self._block_bytes)
        return Ranges(starts, np.full_like(starts, self._layer_bytes))

    def written_ranges(self, layer: int, plan: AttentionPlan) -> Ranges:
        """The rows of the step's tokens, keys and values."""
        row_bytes = self._layer_bytes // (2 * self.kv_cache.shape[3])
        blocks, offsets = plan.write_blocks.numpy(), plan.write_offsets.numpy()
        keys = self._layer_address(layer) + blocks * self._block_bytes + offsets * row_bytes
        starts = np.concatenate((keys, keys + self._layer_bytes // 2)).astype(np.uint64)
        return Ranges(starts, np.full_like(starts, row_bytes))

    def _try_paths(self, blocks: DeviceBlocks) -> None:
        """It takes a tenth of a second, and tests of its own."""

    def _layer_address(self, layer: int) -> int:
        return self._address + layer * self._layer_bytes

    def _make_kv_cache(self, config: EngineConfig) -> torch.Tensor:
        shape = self.model.config
        self._block_bytes = block_bytes(self.model, config)
        self._layer_bytes = self._block_bytes // shape.layer_count
        length_bytes = self._block_bytes * config.device_block_count
        self._address = self.cuda.allocate_device(length_bytes)
        memory = self.cuda.device_bytes(self._address, length_bytes)
        memory[:] = 0
        elements = torch.from_numpy(memory).view(self.model.weights.embedding.dtype)
        return elements.view(
            config.device_block_count,
            shape.layer_count,
            2,
            config.block_tokens,
            shape.kv_head_count,
            shape.head_size,
        )
