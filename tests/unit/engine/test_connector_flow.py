"""The engine's half of the connector's contract, against a connector that does its worst."""

from __future__ import annotations

import pytest

from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.engine import Engine
from tests.support.memory_connector import MemoryBlocks, connected_engine
from tests.support.tiny_models import prompt_of, tiny_model, tokens_alone

GREEDY = SamplingParams(tokens_max=6)
PROMPT = prompt_of(22, seed=3)

pytestmark = pytest.mark.usefixtures("every_load")


def engine_over(blocks: MemoryBlocks, **options: int) -> Engine:
    config = EngineConfig(**{"block_tokens": 4, "device_block_count": 64, **options})
    return connected_engine(tiny_model(), config, blocks)


def alone(prompt: list[int], params: SamplingParams = GREEDY) -> tuple[int, ...]:
    return tokens_alone(prompt, params)


def assert_drained(engine: Engine, blocks: MemoryBlocks) -> None:
    assert engine.wait_offloads(1.0)
    assert engine.check_invariants() == []
    assert engine.scheduler.pool.free_count == engine.config.device_block_count
    assert blocks.overwritten == [], "a device block was reused while an offload read it"


@pytest.fixture
def filled(every_load: None) -> MemoryBlocks:
    """What an engine that has answered PROMPT leaves behind."""
    blocks = MemoryBlocks()
    engine = engine_over(blocks)
    engine.generate([PROMPT], GREEDY)
    assert_drained(engine, blocks)
    return blocks


def test_prompt_and_answer_are_offloaded(filled: MemoryBlocks) -> None:
    assert len(filled.resident) == 6  # 22 + 6 tokens, the last one's KV never computed: 27.


def test_worker_hears_of_every_step_what_it_computes() -> None:
    """Offloads are held back by how long steps of equal size take with them and without."""
    blocks = MemoryBlocks()
    engine = engine_over(blocks, step_tokens_max=16, running_count_max=4)
    engine.generate([PROMPT], SamplingParams(tokens_max=3))
    engine.step()
    assert blocks.step_tokens == [16, 6, 1, 1, 0]


def test_another_engine_onboards_and_gives_the_same_tokens(filled: MemoryBlocks) -> None:
    engine = engine_over(filled)
    result = engine.generate([PROMPT], GREEDY)[0]
    assert result.token_ids == alone(PROMPT)
    assert (result.engine_cache_count, result.kvtier_count, result.computed_count) == (0, 20, 2)
    assert_drained(engine, filled)


def test_onboarded_blocks_are_in_the_engines_own_cache_after(filled: MemoryBlocks) -> None:
    engine = engine_over(filled)
    engine.generate([PROMPT], SamplingParams(tokens_max=1))  # Fills no block by itself.
    result = engine.generate([PROMPT], GREEDY)[0]
    assert (result.engine_cache_count, result.kvtier_count) == (20, 0)
    assert filled.onboarded_count == 5


def test_own_prefix_comes_first_and_only_the_rest_is_onboarded(filled: MemoryBlocks) -> None:
    engine = engine_over(filled)
    engine.generate([PROMPT[:9]], SamplingParams(tokens_max=1))
    filled.onboarded_count = 0
    result = engine.generate([PROMPT], GREEDY)[0]
    assert result.token_ids == alone(PROMPT)
    assert (result.engine_cache_count, result.kvtier_count) == (8, 12)
    assert filled.onboarded_count == 3


def test_failed_onboard_is_computed(filled: MemoryBlocks) -> None:
    filled.fails_onboards = True
    engine = engine_over(filled)
    result = engine.generate([PROMPT], GREEDY)[0]
    assert result.token_ids == alone(PROMPT)
    assert (result.kvtier_count, result.computed_count) == (0, 22)
    assert_drained(engine, filled)


def test_failed_onboard_keeps_the_engines_own_prefix(filled: MemoryBlocks) -> None:
    engine = engine_over(filled)
    filled.fails_onboards = True
    engine.generate([PROMPT[:9]], SamplingParams(tokens_max=1))
    result = engine.generate([PROMPT], GREEDY)[0]
    assert result.token_ids == alone(PROMPT)
    assert (result.engine_cache_count, result.computed_count) == (8, 14)


def test_requests_behind_one_that_asks_kvtier_go_on(filled: MemoryBlocks) -> None:
    engine = engine_over(filled)
    filled.none_count = 1
    other = prompt_of(6, seed=4)
    engine.add_request("asks", PROMPT, GREEDY)
    engine.add_request("goes on", other, SamplingParams(tokens_max=1))
    assert [output.request_id for output in engine.step()] == ["goes on"]
    assert engine.scheduler.waiting_count == 1


def test_answer_that_comes_late_is_used(filled: MemoryBlocks) -> None:
    engine = engine_over(filled)
    filled.none_count = 5
    result = engine.generate([PROMPT], GREEDY)[0]
    assert result.token_ids == alone(PROMPT)
    assert result.kvtier_count == 20


def test_onboarding_request_gives_no_token_while_others_do(filled: MemoryBlocks) -> None:
    filled.copy_polls = 200
    engine = engine_over(filled)
    engine.add_request("onboards", PROMPT, GREEDY)
    engine.add_request("computes", prompt_of(6, seed=4), SamplingParams(tokens_max=4))
    seen = [output.request_id for _ in range(4) for output in engine.step()]
    assert seen == ["computes"] * 4
    assert engine.unfinished_count == 1


@pytest.mark.parametrize("count", [20, 21, 19])
def test_prompt_resident_as_a_whole_computes_its_last_token(
    filled: MemoryBlocks, count: int
) -> None:
    engine = engine_over(filled)
    prompt = PROMPT[:count]
    result = engine.generate([prompt], GREEDY)[0]
    assert result.token_ids == alone(prompt)
    assert result.kvtier_count == (count - 1) // 4 * 4
    assert_drained(engine, filled)


def test_blocks_of_a_finished_request_are_kept_while_they_are_read() -> None:
    blocks = MemoryBlocks(copy_polls=50)
    engine = engine_over(blocks, device_block_count=16)
    for seed in range(4):  # Together more blocks than there are.
        prompt = prompt_of(22, seed=seed)
        assert engine.generate([prompt], GREEDY)[0].token_ids == alone(prompt)
    blocks.copy_polls = 1
    assert_drained(engine, blocks)


def test_preemption_with_slow_copies_gives_the_same_tokens() -> None:
    blocks = MemoryBlocks(copy_polls=7)
    engine = engine_over(blocks, device_block_count=14)
    params = SamplingParams(tokens_max=12)
    prompts = [prompt_of(count, seed=count) for count in (13, 14, 15)]
    results = engine.generate(prompts, params)
    assert blocks.preempted_count > 0
    assert [result.token_ids for result in results] == [alone(p, params) for p in prompts]
    assert_drained(engine, blocks)


@pytest.mark.parametrize("fails", [False, True])
def test_many_onboards_in_too_few_blocks_all_end(fails: bool) -> None:
    params = SamplingParams(tokens_max=12)
    prompts = [prompt_of(count, seed=count) for count in (16, 17, 18, 19)]
    blocks = MemoryBlocks()
    engine_over(blocks).generate(prompts, params)
    blocks.copy_polls, blocks.fails_onboards = 5, fails
    engine = engine_over(blocks, device_block_count=11)
    results = engine.generate(prompts, params)
    assert [result.token_ids for result in results] == [alone(p, params) for p in prompts]
    assert_drained(engine, blocks)


def test_request_cancelled_in_mid_onboard_keeps_its_blocks_till_the_copy_ends(
    filled: MemoryBlocks,
) -> None:
    filled.copy_polls = 200
    engine = engine_over(filled)
    engine.add_request("cancelled", PROMPT, GREEDY)
    engine.step()
    engine.cancel("cancelled")
    # What followed the prefix was computed beside its load.
    kept_count = 6 if engine.config.layerwise_loading else 5
    assert engine.scheduler.tables.kept_count == kept_count
    assert engine.scheduler.pool.free_count == 64 - kept_count
    assert_drained(engine, filled)
    assert engine.scheduler.pool.cached_count == 0


def test_engine_without_prefix_cache_still_uses_kvtier(filled: MemoryBlocks) -> None:
    config = EngineConfig(block_tokens=4, device_block_count=64, prefix_caching=False)
    engine = connected_engine(tiny_model(), config, filled)
    for _ in range(2):
        result = engine.generate([PROMPT], GREEDY)[0]
        assert (result.engine_cache_count, result.kvtier_count) == (0, 20)
        assert result.token_ids == alone(PROMPT)
