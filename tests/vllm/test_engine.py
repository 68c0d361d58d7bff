"""Real engines, one after the other, on one daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.daemon import RunningDaemon
from tests.vllm.engines import prompt_of, transfer_config, vllm_engine

pytestmark = pytest.mark.vllm


def test_engine_started_again_computes_the_tail_alone(
    tiny_llama: Path, daemon: RunningDaemon
) -> None:
    prompts = [prompt_of(100), prompt_of(100, seed=1, shared=64), prompt_of(170, seed=2)]
    with vllm_engine(tiny_llama) as engine:
        alone = engine.generate(prompts)
    with vllm_engine(tiny_llama, transfer_config(daemon.socket)) as engine:
        engine.wait_ready()
        first = engine.generate(prompts)
        engine.settle()
    with vllm_engine(tiny_llama, transfer_config(daemon.socket)) as engine:
        engine.wait_ready()
        second = engine.generate(prompts)
        engine.settle()
        assert engine.stats.onboarded_blocks >= 3 + 1 + 5  # Two blocks are shared.
    assert [g.token_ids for g in first] == [g.token_ids for g in alone]
    assert [g.token_ids for g in second] == [g.token_ids for g in alone]
    assert [g.cached_count for g in second] == [96, 96, 160]
