"""A GPU to compute on, by torch on its current stream; copies go through streams of kvtier's own.

Never run on a GPU by us: its parts are tested with a stand-in for CUDA (tests/support/fake_gpu.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtier.cuda.device_layout import DeviceLayout, DeviceTensor, layout_of
from kvtier.cuda.kernel_cache import KernelCompiler, NvrtcCompiler
from kvtier.cuda.kernel_copies import find_run_kernels
from kvtier.cuda.runtime import CudaRuntime, Stream
from kvtier.engine.attention import AttentionPlan
from kvtier.engine.config import EngineConfig
from kvtier.engine.gpu.kernel_attention import find_attention
from kvtier.engine.kv_cache import columns_of, copy_blocks, make_kv_cache
from kvtier.engine.model import LayerWeights, LlamaModel, ModelWeights

if TYPE_CHECKING:
    from kvtier.connector import ConnectorSettings
    from kvtier.connector.stream_copying import DeviceBlocks

log = logging.getLogger(__name__)


class GpuDevice:
    """Torch queues what a part computes, and returns; the first read of a result waits for it."""

    def __init__(
        self,
        model: LlamaModel,
        config: EngineConfig,
        runtime: CudaRuntime,
        place: torch.device,
        *,
        make_compiler: Callable[[], KernelCompiler] = NvrtcCompiler,
    ) -> None:
        self._runtime = runtime
        self._place = place
        self._index = place.index or 0
        self._layer_count = model.config.layer_count if config.layerwise_loading else 0
        self._make_compiler = make_compiler
        runtime.use_device(self._index)
        self.model = model_on(model, place)
        self.kv_cache = self._make_kv_cache(config)
        self.attention = find_attention(self, make_compiler)

    @property
    def runtime(self) -> CudaRuntime:
        return self._runtime

    @property
    def index(self) -> int:
        """CUDA's number of it."""
        return self._index

    def stream(self) -> Stream:
        """What the engine's thread computes on."""
        return Stream(torch.cuda.current_stream(self._place).cuda_stream)

    def address_of(self, tensor: Tensor) -> int:
        """As the device knows it."""
        return tensor.data_ptr()

    def put(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """All in one copy. It is taken from pinned memory, which torch keeps until the copy has
        ended: from other memory the call would wait for all that is queued before it."""
        sizes = [column.numel() for column in columns]
        packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=self._is_cuda)
        torch.cat([column.flatten() for column in columns], out=packed)
        placed = torch.split_with_sizes(packed.to(self._place, non_blocking=True), sizes)
        return [part.view(column.shape) for part, column in zip(placed, columns, strict=True)]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        copy_blocks(self.kv_cache, *self.put(columns_of(copies)))

    def launch(self, part: Callable[[], None]) -> None:
        part()

    def launch_layer(self, part: Callable[[], None], layer: int, plan: AttentionPlan) -> None:
        part()

    def wait_computed(self) -> None:
        """Torch does so, when a tensor is read on the host."""

    def make_blocks(self, settings: ConnectorSettings) -> DeviceBlocks:
        """Tries every way of copying first, which takes milliseconds. Raises CudaUnavailable."""
        from kvtier.connector.stream_copying import DeviceBlocks

        blocks = DeviceBlocks(
            self._runtime,
            self._index,
            kv_layout(self.kv_cache, self.address_of(self.kv_cache)),
            self.stream,
            kernels=find_run_kernels(self._runtime, self._index, self._make_compiler),
            offload_stretch_max=settings.offload_stretch_max,
            layer_count=self._layer_count,
        )
        self._try_paths(blocks)
        return blocks

    @property
    def _is_cuda(self) -> bool:
        return self._place.type == "cuda"

    def _try_paths(self, blocks: DeviceBlocks) -> None:
        if wrong := blocks.streams.try_paths():
            log.error("this GPU or its driver copies wrongly by some ways: %s", ", ".join(wrong))

    def _make_kv_cache(self, config: EngineConfig) -> Tensor:
        return make_kv_cache(self.model, config)


def kv_layout(kv_cache: Tensor, address: int) -> DeviceLayout:
    """Where a block lies; a slot's bytes are those of an engine that computes in host memory."""
    size = kv_cache.element_size()
    strides = tuple(stride * size for stride in kv_cache.stride())
    return layout_of([DeviceTensor(address, tuple(kv_cache.shape), strides, size)])


def model_on(model: LlamaModel, place: torch.device) -> LlamaModel:
    """The same model with its weights there; itself if they are."""
    weights = model.weights
    if weights.embedding.device == place:
        return model
    embedding = weights.embedding.to(place)
    moved = ModelWeights(
        embedding=embedding,
        layers=tuple(
            LayerWeights(
                **{part.name: getattr(layer, part.name).to(place) for part in fields(layer)}
            )
            for layer in weights.layers
        ),
        final_norm=weights.final_norm.to(place),
        # What is one tensor stays one.
        output=embedding if weights.output is weights.embedding else weights.output.to(place),
    )
    return LlamaModel(model.name, model.config, moved, model.weights_digest)
