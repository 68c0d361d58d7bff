"""A real engine of MLA: its latents leave, outlive the engine, and come back in their places.

Bytes are compared, not tokens: on CPUs the MLA of vLLM contradicts itself without kvtier as well
(docs/vllm.md), for which kvtier refuses such an engine (test_options.py). Here it is let in.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.connector.vllm import refusals
from tests.support.daemon import RunningDaemon
from tests.vllm.engines import prompt_of
from tests.vllm.test_engine import kvtier_engine
from tests.vllm.test_grouped_engine import record
from tests.vllm.versions import needs_engine

pytestmark = [pytest.mark.vllm, needs_engine, pytest.mark.timeout(300)]

BLOCK_TOKENS = 16  # The only size that vLLM's MLA for CPUs has.
COUNTS = (1, 3, 12)
PROMPTS = [prompt_of(BLOCK_TOKENS * count + 5, seed=seed) for seed, count in enumerate(COUNTS)]


@pytest.fixture(autouse=True)
def let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_is_blind_to_prefixes", lambda config: False)


def test_latents_come_back_to_the_device_of_another_engine_with_the_same_bytes(
    tiny_deepseek: Path, daemon: RunningDaemon
) -> None:
    with kvtier_engine(tiny_deepseek, daemon) as engine:
        [before] = record(engine)
        engine.generate(PROMPTS)
        engine.settle()
        assert engine.stats.committed_blocks == len(before.out) >= sum(COUNTS)
    with kvtier_engine(tiny_deepseek, daemon) as engine:
        [after] = record(engine)
        said = engine.generate(PROMPTS)
        engine.settle()
        assert [one.cached_count for one in said] == [BLOCK_TOKENS * count for count in COUNTS]
        assert engine.stats.onboarded_blocks == len(after.back) == sum(COUNTS)
        assert engine.left_behind() == []
    assert len(set(after.back)) == sum(COUNTS), "blocks that are all alike show nothing"
    assert set(after.back) <= set(before.out), "a block came back with other bytes"
