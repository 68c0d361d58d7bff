"""How long an engine's steps take beside its copies, in the fake's virtual time.

The model is small, but it has 32 layers and the KV of an 8B one: blocks of 2 MiB. Copies and layers
take what the fake says, so this is about what waits for what, not about a machine's speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from kvtier.cuda.fake_timeline import Engine as Resource
from kvtier.engine.config import EngineConfig, ModelConfig, SamplingParams
from kvtier.engine.model import LlamaModel
from tests.support.fake_gpu import ComputeCosts, FakeGpu
from tests.support.gpu_bench import GpuBench
from tests.support.tiny_models import random_model

SHAPE = ModelConfig(
    layer_count=32,
    hidden_size=16,
    ffn_size=16,
    head_count=8,
    kv_head_count=8,
    head_size=128,
    vocab_size=64,
)
CONFIG = EngineConfig(block_tokens=16, device_block_count=24, device="cuda")
BY_LAYER = replace(CONFIG, layerwise_loading=True)
PREFIX_BLOCKS = 20
PROMPT = [(7 * index) % 64 for index in range(16 * PREFIX_BLOCKS + 8)]
# So long beside the longer of computing and copying may both of them take.
BOUND = 1.15

pytestmark = pytest.mark.slow


@cache
def model() -> LlamaModel:
    return random_model(SHAPE, 1, dtype=torch.bfloat16)


@dataclass
class Timing:
    """From a beginning to an end, and how long its resources were occupied meanwhile."""

    seconds: float
    compute: float
    copy: float

    @property
    def is_overlapped(self) -> bool:
        return self.seconds <= BOUND * max(self.compute, self.copy)


def timing_of(bench: GpuBench, copies: Resource, run: Callable[[], None]) -> Timing:
    timeline = bench.cuda.timeline

    def read() -> list[float]:
        busy = [timeline.busy_seconds(engine) for engine in (Resource.COMPUTE, copies)]
        return [bench.cuda.now, *busy]

    before = read()
    run()
    return Timing(*(after - start for start, after in zip(before, read(), strict=True)))


def bench_of(config: EngineConfig, costs: ComputeCosts) -> GpuBench:
    gpu = FakeGpu(model(), config, costs=costs)
    bench = GpuBench(model(), config, gpu=gpu, slot_count=48)
    bench.blocks._registry.warm(0.0)  # A worker does so while it has nothing to copy.
    return bench


# ------------------------------------------------------------------------------ a prefix comes in


def first_token_of(config: EngineConfig, spoil: Callable[[GpuBench], None]) -> Timing:
    """From the step that begins to load the prefix to the first token."""
    bench = bench_of(config, ComputeCosts(layer_seconds=30e-6))
    bench.fill(PROMPT)
    spoil(bench)
    bench.engine.add_request("r", PROMPT, SamplingParams(tokens_max=1))
    assert bench.engine.step() == []  # The lease is asked for.
    synchronize_count = bench.cuda.synchronize_count

    def run() -> None:
        while not bench.engine.step():
            bench.engine._pause(20e-6)

    timing = timing_of(bench, Resource.HOST_TO_DEVICE, run)
    assert bench.scheduler.stats().onboarded_blocks == PREFIX_BLOCKS
    assert bench.gpu.read_count == 1
    if spoil is nothing:
        assert bench.cuda.synchronize_count == synchronize_count == 0
        bench.close()
    return timing


def nothing(bench: GpuBench) -> None:
    pass


def wait_in_each_layer(bench: GpuBench) -> None:
    """As an engine that waits, on the host, for a layer's load before it launches the layer."""
    follow = bench.blocks.follow_layer

    def follow_and_wait(layer: int) -> None:
        follow(layer)
        bench.cuda.synchronize_stream(bench.gpu.compute)

    bench.blocks.follow_layer = follow_and_wait  # type: ignore[method-assign]


def test_a_prefix_of_32_layers_comes_in_beside_what_is_computed() -> None:
    timing = first_token_of(BY_LAYER, nothing)
    assert min(timing.compute, timing.copy) > 0.7 * max(timing.compute, timing.copy)
    assert timing.is_overlapped, timing


@pytest.mark.parametrize(
    ("config", "spoil"),
    [(CONFIG, nothing), (BY_LAYER, wait_in_each_layer)],
    ids=["the load as a whole first", "a wait in each layer"],
)
def test_one_after_the_other_takes_longer(
    config: EngineConfig, spoil: Callable[[GpuBench], None]
) -> None:
    """What the test before must be able to tell."""
    timing = first_token_of(config, spoil)
    assert not timing.is_overlapped, timing


# ---------------------------------------------------------------------------- blocks are offloaded


def decode_beside_offload(after_prefill: Callable[[GpuBench], None]) -> Timing:
    """From the end of a prompt's prefill until four more tokens are there and its blocks are
    committed."""
    bench = bench_of(CONFIG, ComputeCosts(layer_seconds=8e-6))
    bench.engine.add_request("r", PROMPT, SamplingParams(tokens_max=5))
    while not bench.engine.step():
        pass

    def run() -> None:
        after_prefill(bench)
        for _ in range(4):
            assert len(bench.engine.step()) == 1
        assert bench.engine.wait_offloads(1.0)

    timing = timing_of(bench, Resource.DEVICE_TO_HOST, run)
    assert len(bench.client.commits) == PREFIX_BLOCKS
    assert bench.gpu.read_count == 5
    bench.close()
    return timing


def test_blocks_are_offloaded_behind_the_steps_that_follow() -> None:
    timing = decode_beside_offload(nothing)
    assert min(timing.compute, timing.copy) > 0.7 * max(timing.compute, timing.copy)
    assert timing.is_overlapped, timing


def test_an_engine_that_waits_for_its_offloads_takes_longer() -> None:
    """What the test before must be able to tell."""

    def wait(bench: GpuBench) -> None:
        assert bench.engine.wait_offloads(1.0)

    timing = decode_beside_offload(wait)
    assert not timing.is_overlapped, timing
