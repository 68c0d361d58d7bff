"""The reference engine on a fake GPU and a real daemon: real threads, sockets and slabs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.connect import ConnectedEngine, connected_engine
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.engines import CONFIG, PATIENT, patient_client
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny_models import prompt_of, tiny_model, tokens_alone

pytestmark = pytest.mark.slow

WHOLE = replace(CONFIG, device="cuda")
BY_LAYER = replace(WHOLE, layerwise_loading=True)
GREEDY = SamplingParams(tokens_max=6)
PROMPTS = [prompt_of(count, seed=count) for count in (150, 33, 90)]
# A fake's time is not the clock's, so there is nothing to learn from how long its steps take.
SETTINGS = replace(PATIENT, offload_stretch_max=0.0)


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(dram_bytes="16MiB", slab_bytes="4MiB") as running:
        running.wait_populated()
        yield running


@contextmanager
def engine_on(
    daemon: RunningDaemon, config: EngineConfig, seed: int | None
) -> Iterator[ConnectedEngine]:
    """No race may have been seen when it ends, and nobody have waited for the device."""
    gpu = FakeGpu(tiny_model(), config, seed=seed)
    client = patient_client(daemon.socket)
    try:
        with connected_engine(
            tiny_model(), config, client, settings=SETTINGS, device=gpu
        ) as connected:
            assert connected.wait_ready(10.0)
            yield connected
            assert connected.engine.check_invariants() == []
            assert gpu.cuda.synchronize_count == 0
    finally:
        client.close()
    gpu.cuda.checker.assert_no_races()


@pytest.mark.parametrize("config", [WHOLE, BY_LAYER], ids=["whole loads", "by layer"])
@pytest.mark.parametrize("seed", [None, 1])
def test_the_second_engine_gets_the_firsts_kv_and_the_same_tokens(
    daemon: RunningDaemon, config: EngineConfig, seed: int | None
) -> None:
    expected = [tokens_alone(prompt, GREEDY) for prompt in PROMPTS]
    with engine_on(daemon, config, seed) as connected:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert connected.engine.generate([prompt], GREEDY)[0].token_ids == tokens
            assert connected.engine.wait_offloads(15.0)
    with engine_on(daemon, config, seed) as connected:
        results = connected.engine.generate(PROMPTS, GREEDY)
        assert [result.token_ids for result in results] == expected
        assert [result.kvtier_count for result in results] == [148, 32, 88]


def test_a_daemon_killed_beside_a_load_changes_no_token(daemon: RunningDaemon) -> None:
    with engine_on(daemon, BY_LAYER, None) as connected:
        connected.engine.generate(PROMPTS[:1], GREEDY)
        assert connected.engine.wait_offloads(15.0)
    with engine_on(daemon, BY_LAYER, None) as connected:
        stream = connected.engine.stream(PROMPTS[0], GREEDY)
        first = next(stream)
        daemon.kill()
        tokens = [first.token_id, *(output.token_id for output in stream)]
        assert tuple(tokens) == tokens_alone(PROMPTS[0], GREEDY)
        [other] = connected.engine.generate(PROMPTS[2:], GREEDY)
        assert other.token_ids == tokens_alone(PROMPTS[2], GREEDY)
