"""The reference engine on a rig's device, on kvtier's connector, streams and kernels.

The daemon is an object in this process: it has a slab's memory, and answers at once. So what is
measured is an engine and its copies; what a daemon costs stands in docs/benchmarks.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import kvtier.engine  # noqa: F401 - before torch, see there

# isort: split
import torch
from torch import Tensor

from benchmarks.gpu.rig import Rig
from benchmarks.gpu.slabs import Slab
from kvtier.connector import (
    ConnectorSettings,
    JobResult,
    OffloadJob,
    SchedulerConnector,
    StepPlan,
    WorkerConnector,
)
from kvtier.connector.stream_copying import DeviceBlocks
from kvtier.connector.stream_lane import StreamLane
from kvtier.engine.config import EngineConfig, ModelConfig
from kvtier.engine.connector_api import EngineConnector
from kvtier.engine.device import EngineDevice, open_device
from kvtier.engine.engine import Engine
from kvtier.engine.gpu.kernel_attention import KernelAttention
from kvtier.engine.kv_cache import namespace_spec
from kvtier.engine.model import LayerWeights, LlamaModel, ModelWeights
from kvtier.engine.prefix_index import Prefix
from kvtier.policy.load_or_recompute import OnboardWish
from tests.support.fake_client import FakeClient, FakeSession
from tests.support.stepped_control import SteppedControl

# Weights of so many layers are kept and used in turn: more than any L2 cache holds.
_KEPT_LAYERS = 4
_BACKGROUND_FIRST = 1 << 40  # Job ids that no planning gives.
_BACKGROUND_BLOCKS = 64


class RigClock:
    """A kvtier.clock.Clock."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def now(self) -> float:
        return self._rig.now()

    def now_ns(self) -> int:
        return round(self._rig.now() * 1e9)


def random_weights(config: ModelConfig, device: str) -> LlamaModel:
    """Of the given shape, drawn on the device; tokens mean nothing, times do."""
    dtype = torch.bfloat16 if device != "cpu" else torch.float32

    def matrix(rows: int, columns: int) -> Tensor:
        drawn = torch.randn(rows, columns, dtype=dtype, device=device)
        return drawn.mul_(1 / math.sqrt(columns))

    heads = config.head_count * config.head_size
    qkv_rows = heads + 2 * config.kv_head_count * config.head_size
    ones = torch.ones(config.hidden_size, dtype=dtype, device=device)
    kept = [
        LayerWeights(
            attention_norm=ones,
            qkv=matrix(qkv_rows, config.hidden_size),
            attention_out=matrix(config.hidden_size, heads),
            ffn_norm=ones,
            gate_up=matrix(2 * config.ffn_size, config.hidden_size),
            down=matrix(config.hidden_size, config.ffn_size),
        )
        for _ in range(min(_KEPT_LAYERS, config.layer_count))
    ]
    layers = tuple(kept[index % len(kept)] for index in range(config.layer_count))
    embedding = matrix(config.vocab_size, config.hidden_size)
    weights = ModelWeights(embedding, layers, ones, embedding)
    return LlamaModel("random", config, weights, digest="random")


class BackgroundWorker(WorkerConnector):
    """Copies blocks out without end, if asked to, beside what is planned."""

    blocks: Sequence[int] = ()
    slots: Sequence[int] = ()
    session: FakeSession | None = None
    copied_bytes = 0
    _number = _BACKGROUND_FIRST
    _is_under_way = False

    def note_step(self, token_count: int) -> None:
        super().note_step(token_count)
        if self.blocks and not self._is_under_way:
            self._number += 1
            self._is_under_way = True
            job = OffloadJob(self._number, "", self.session, tuple(self.slots), tuple(self.blocks))
            self.start(StepPlan(self.spec, offloads=(job,)))

    def poll(self) -> list[JobResult]:
        results = super().poll()
        for result in results:
            if result.job_id == self._number:
                self._is_under_way = False
                self.copied_bytes += result.bytes_count
        return [result for result in results if result.job_id < _BACKGROUND_FIRST]


class EngineRig:
    """One engine with its device, slab and daemon."""

    def __init__(
        self,
        rig: Rig,
        model: LlamaModel,
        config: EngineConfig,
        *,
        slot_count: int,
        offload_stretch_max: float,
    ) -> None:
        make_device = rig.make_engine_device or open_device
        self.device: EngineDevice = make_device(model, config)
        self._rig, clock = rig, RigClock(rig)
        spec = namespace_spec(model, config)
        slot_count += _BACKGROUND_BLOCKS
        self.slab = Slab(slot_count * spec.shard_bytes)
        self.client = FakeClient(clock, slot_count=slot_count, shard_bytes=spec.shard_bytes)
        memory = self.slab.array[: slot_count * spec.shard_bytes]
        self.client.memory = memory.reshape(1, slot_count, spec.shard_bytes)
        settings = ConnectorSettings(
            stock_blocks=min(slot_count, 1024),
            offload_blocks_per_plan=1024,
            onboard=OnboardWish.ALWAYS,
            onboard_wait_seconds=5.0,
            finish_wait_seconds=60.0,
            holds_preempted_blocks=True,
            offload_stretch_max=offload_stretch_max,
            raise_internal_errors=True,
        )
        self._background_slots = [self.client.free.pop() for _ in range(_BACKGROUND_BLOCKS)]
        control = SteppedControl()
        control.is_eager = True
        self.scheduler = SchedulerConnector(
            self.client, spec, settings=settings, clock=clock, control=control
        )
        blocks = self.device.make_blocks(settings)
        assert isinstance(blocks, DeviceBlocks)
        self._lane = self._make_lane(blocks)
        self.worker = BackgroundWorker(
            self.client, spec, blocks, settings=settings, clock=clock, lane=self._lane
        )
        self.engine = Engine(
            model,
            config,
            EngineConnector(self.scheduler, self.worker),
            device=self.device,
            clock=clock,
            pause=self._pause,
        )
        self.namespace = self.client.open_namespace(spec)

    @property
    def attention(self) -> str:
        """By what decodes are computed."""
        return "kernels" if isinstance(self.device.attention, KernelAttention) else "torch"

    def begin_background(self) -> None:
        """Copy blocks that no request uses out again and again from now on."""
        pool = self.engine.scheduler.pool
        self.worker.blocks = pool.take(min(_BACKGROUND_BLOCKS, pool.free_count))
        self.worker.slots = self._background_slots[: len(self.worker.blocks)]
        self.worker.session = self.client.session

    def end_background(self) -> None:
        self.engine.scheduler.pool.release(self.worker.blocks)
        self.worker.blocks = ()

    def are_bytes_right(self, hashes: Sequence[Any], count_max: int = 8) -> bool:
        """Of some of the blocks that are both on the device and in slots."""
        device_blocks = self.engine.scheduler.pool.index.match(Prefix((), hashes))
        step = max(1, len(device_blocks) // count_max)
        for block_hash, block in list(zip(hashes, device_blocks, strict=False))[::step]:
            held = self.engine.kv_cache[block].reshape(-1).view(torch.uint8).cpu()
            slot = self.client.memory[0][self.namespace.resident[block_hash]]
            if not torch.equal(held, torch.from_numpy(slot.copy())):
                return False
        return bool(device_blocks)

    def close(self) -> None:
        self.engine.wait_offloads(10.0)
        self.worker.close()
        self.scheduler.close()
        assert self.client.pins is not None
        self.client.pins.give_up(self.slab.address)
        self.slab.close()

    def _make_lane(self, blocks: DeviceBlocks) -> StreamLane:
        if not self._rig.stand_in:
            return blocks.make_lane()
        lane = StreamLane(blocks.streams, threaded=False)
        device: Any = self.device
        device.meanwhile = lane.step
        return lane

    def _pause(self, seconds: float) -> None:
        if self._rig.stand_in:
            self._lane.step()
        self._rig.rest(seconds)
