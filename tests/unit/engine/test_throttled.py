"""Offloads that are held back for the sake of steps, when the engine makes none."""

from __future__ import annotations

from dataclasses import replace

from kvtier.engine.config import EngineConfig, SamplingParams
from tests.support.gpu_bench import SETTINGS, GpuBench
from tests.support.tiny_models import prompt_of, tiny_model


def test_an_engine_that_waits_for_its_offloads_does_not_hold_them_back() -> None:
    config = EngineConfig(block_tokens=4, device_block_count=12, running_count_max=4)
    settings = replace(SETTINGS, offload_stretch_max=0.05)
    bench = GpuBench(tiny_model(), config, settings=settings)
    for _ in range(34):  # Never a step alone: so copies are held, to see one.
        bench.clock.advance(0.01)
        bench.blocks.streams.stored_bytes += 2 << 20
        bench.worker.note_step(12)
    bench.engine.add_request("r", prompt_of(12, seed=1), SamplingParams(tokens_max=1))
    bench.engine.step()
    assert bench.scheduler.has_work
    assert bench.engine.wait_offloads(1.0)
    assert len(bench.client.commits) > 0
    bench.close()
