"""Where an engine computes: its weights, its KV, and how the parts of a step are launched there.

A step is a row of parts on one stream: they run in the order of their launches, in host memory at
once, on a GPU later. What the engine decides it decides in host memory; of what is computed it
reads the tokens alone, once a step, and nothing else in a step waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvtier.cuda.cudart import open_cudart
from kvtier.cuda.errors import CudaUnavailable
from kvtier.engine.attention import Attention, AttentionPlan, TorchAttention, stay
from kvtier.engine.config import EngineConfig
from kvtier.engine.copier import HostBlockCopier
from kvtier.engine.kv_cache import columns_of, copy_blocks, make_kv_cache
from kvtier.engine.model import LlamaModel

if TYPE_CHECKING:
    from kvtier.connector import ConnectorSettings
    from kvtier.connector.copying import BlockCopier
    from kvtier.connector.stream_copying import DeviceBlocks

Part = Callable[[], None]


class EngineDevice(Protocol):
    """One engine's; called by its thread alone."""

    model: LlamaModel
    """With its weights there."""
    kv_cache: Tensor
    attention: Attention

    def put(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """Integers from host memory to where the model computes, before what is launched next."""
        ...

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Of each pair, all of the first device block into the second: of what was launched before,
        and before what is launched next. No block is in two pairs' second places."""
        ...

    def launch(self, part: Part) -> None:
        """Run a part that touches no KV, after all that was launched before."""
        ...

    def launch_layer(self, part: Part, layer: int, plan: AttentionPlan) -> None:
        """As `launch`, for one layer: it writes and reads KV as the plan says."""
        ...

    def wait_computed(self) -> None:
        """Before what was computed is read."""
        ...

    def make_blocks(self, settings: ConnectorSettings) -> BlockCopier | DeviceBlocks:
        """For the connector's worker side."""
        ...


def open_device(model: LlamaModel, config: EngineConfig) -> EngineDevice:
    """What `config.device` names. Raises CudaUnavailable, saying why."""
    if config.device == "cpu":
        return HostDevice(model, config)
    if not torch.cuda.is_available():
        raise CudaUnavailable(f"device {config.device!r}: torch finds no GPU that it can use")
    from kvtier.engine.gpu.gpu_device import GpuDevice

    _, _, number = config.device.partition(":")
    index = int(number) if number else torch.cuda.current_device()
    return GpuDevice(model, config, open_cudart(), torch.device("cuda", index))


class HostDevice:
    """Host memory and this thread: a part has run when its launch returns."""

    def __init__(self, model: LlamaModel, config: EngineConfig) -> None:
        self.model = model
        self.kv_cache = make_kv_cache(model, config)
        self.attention: Attention = TorchAttention(self.kv_cache)

    def put(self, columns: Sequence[Tensor]) -> list[Tensor]:
        return stay(columns)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        copy_blocks(self.kv_cache, *stay(columns_of(copies)))

    def launch(self, part: Part) -> None:
        part()

    def launch_layer(self, part: Part, layer: int, plan: AttentionPlan) -> None:
        part()

    def wait_computed(self) -> None:
        pass

    def make_blocks(self, settings: ConnectorSettings) -> BlockCopier:
        return HostBlockCopier(self.kv_cache)
