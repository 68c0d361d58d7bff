"""Whatever is batched, cut, cached or preempted: the tokens are those of a request run alone.

The tiny model's logits lie far apart compared with rounding, so tokens are compared exactly.
"""

from __future__ import annotations

import pytest

from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.engine import Engine
from kvtier.engine.request import FinishReason
from kvtier.errors import BadRequest, LimitExceeded
from tests.support.tiny_models import TINY, prompt_of, tiny_engine, tiny_model, tokens_alone

PROMPTS = [prompt_of(count, seed=count) for count in (1, 3, 4, 9, 16, 22)]
GREEDY = SamplingParams(tokens_max=6)

pytestmark = pytest.mark.usefixtures("everywhere")


def alone(prompt: list[int], params: SamplingParams = GREEDY) -> tuple[int, ...]:
    return tokens_alone(prompt, params)


def assert_whole(engine: Engine) -> None:
    assert engine.check_invariants() == []
    assert engine.scheduler.pool.free_count == engine.config.device_block_count


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"step_tokens_max": 8, "running_count_max": 8},
        {"step_tokens_max": 5, "running_count_max": 2},
        {"block_tokens": 1, "device_block_count": 200},
        {"block_tokens": 16},
    ],
    ids=["batched", "prompts in parts", "two at a time", "blocks of 1", "blocks of 16"],
)
def test_batched_tokens_are_those_of_each_request_alone(options: dict[str, int]) -> None:
    engine = tiny_engine(**options)
    results = engine.generate(PROMPTS, GREEDY)
    assert [result.token_ids for result in results] == [alone(prompt) for prompt in PROMPTS]
    assert_whole(engine)


def test_prefill_and_decode_share_a_step() -> None:
    engine = tiny_engine()
    engine.add_request("first", PROMPTS[3], GREEDY)
    engine.step()
    engine.add_request("second", PROMPTS[4], GREEDY)
    assert [output.request_id for output in engine.step()] == ["first", "second"]


def test_token_budget_bounds_each_step() -> None:
    engine = tiny_engine(step_tokens_max=8, running_count_max=4)
    engine.add_request("long", PROMPTS[5], GREEDY)  # 22 tokens: 8, 8, 6.
    counts = []
    for _ in range(3):
        before = engine.scheduler.computed_token_count
        outputs = engine.step()
        counts.append(engine.scheduler.computed_token_count - before)
    assert counts == [8, 8, 6]
    assert len(outputs) == 1


def test_preempted_requests_give_the_same_tokens() -> None:
    params = SamplingParams(tokens_max=12)
    engine = tiny_engine(device_block_count=12)
    prompts = [prompt_of(count, seed=count) for count in (13, 14, 15)]
    results = engine.generate(prompts, params)
    assert sum(result.preempted_count for result in results) > 0
    assert results[0].preempted_count == 0, "the first one always gets on"
    assert [result.token_ids for result in results] == [alone(p, params) for p in prompts]
    assert_whole(engine)


def test_preempted_sampled_request_goes_on_with_its_own_draws() -> None:
    params = SamplingParams(tokens_max=12, temperature=1.0, top_p=0.9, seed=5)
    engine = tiny_engine(device_block_count=9, prefix_caching=False)
    prompts = [prompt_of(13, seed=1), prompt_of(14, seed=2)]
    results = engine.generate(prompts, params)
    assert results[1].preempted_count > 0
    assert [result.token_ids for result in results] == [alone(p, params) for p in prompts]


def test_cached_prefix_gives_the_same_tokens_and_is_counted() -> None:
    engine = tiny_engine()
    prefix = prompt_of(16, seed=7)
    engine.generate([[*prefix, 1, 2]], GREEDY)
    prompt = [*prefix, 3, 4, 5]
    result = engine.generate([prompt], GREEDY)[0]
    assert result.token_ids == alone(prompt)
    assert (result.engine_cache_count, result.kvtier_count, result.computed_count) == (16, 0, 3)


@pytest.mark.parametrize("count", [16, 17, 15])
def test_prompt_cached_as_a_whole_still_computes_its_last_token(count: int) -> None:
    engine = tiny_engine()
    prompt = prompt_of(count, seed=8)
    first = engine.generate([prompt], GREEDY)[0]
    again = engine.generate([prompt], GREEDY)[0]
    assert again.token_ids == first.token_ids == alone(prompt)
    assert again.engine_cache_count == (count - 1) // 4 * 4
    assert_whole(engine)


def test_generated_tokens_are_cached_for_the_next_turn() -> None:
    engine = tiny_engine()
    first = engine.generate([PROMPTS[3]], SamplingParams(tokens_max=12))[0]
    turn = [*PROMPTS[3], *first.token_ids, 5, 6]
    result = engine.generate([turn], GREEDY)[0]
    assert result.engine_cache_count == 20  # 9 + 12 tokens, the last one's KV never computed.
    assert result.token_ids == alone(turn)


def test_running_requests_share_the_blocks_of_their_prefix() -> None:
    engine = tiny_engine()
    prefix = prompt_of(16, seed=9)
    engine.generate([prefix], SamplingParams(tokens_max=1))
    for index in range(3):
        engine.add_request(f"r{index}", [*prefix, index], GREEDY)
    engine.step()
    pool = engine.scheduler.pool
    assert pool.block_count - pool.free_count == 4 + 3
    assert engine.check_invariants() == []


def test_salted_prompts_share_nothing_with_others() -> None:
    engine = tiny_engine()
    for name, salt in (("plain", None), ("a", "a"), ("b", "b"), ("a again", "a")):
        outputs = list(engine.stream(PROMPTS[5], GREEDY, request_id=name, cache_salt=salt))
        result = outputs[-1].result
        assert result is not None
        assert result.engine_cache_count == (20 if name == "a again" else 0)


def test_sampling_depends_on_the_seed_alone() -> None:
    def drawn(seed: int, prompts: list[list[int]]) -> tuple[int, ...]:
        params = SamplingParams(tokens_max=10, temperature=0.8, top_p=0.95, seed=seed)
        return tiny_engine().generate(prompts, params)[0].token_ids

    assert drawn(1, PROMPTS[3:4]) == drawn(1, PROMPTS[3:])
    assert drawn(1, PROMPTS[3:4]) != drawn(2, PROMPTS[3:4])


def test_stop_token_ends_a_request() -> None:
    tokens = alone(PROMPTS[4])
    params = SamplingParams(tokens_max=6, stop_token_ids=frozenset(tokens[2:3]))
    result = tiny_engine().generate([PROMPTS[4]], params)[0]
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids == tokens[: tokens.index(tokens[2]) + 1]


def test_streams_interleave() -> None:
    engine = tiny_engine()
    first, second = (engine.stream(prompt, GREEDY) for prompt in PROMPTS[3:5])
    mixed = [output for pair in zip(first, second, strict=True) for output in pair]
    assert tuple(output.token_id for output in mixed[::2]) == alone(PROMPTS[3])
    assert tuple(output.token_id for output in mixed[1::2]) == alone(PROMPTS[4])
    assert [output.result is not None for output in mixed[::2]] == [False] * 5 + [True]


def test_dropped_stream_cancels_its_request() -> None:
    engine = tiny_engine()
    stream = engine.stream(PROMPTS[3], GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.unfinished_count == 0
    assert_whole(engine)


def test_cancelled_request_frees_its_blocks_at_once() -> None:
    engine = tiny_engine(running_count_max=1)
    engine.add_request("running", PROMPTS[3], GREEDY)
    engine.add_request("waiting", PROMPTS[4], GREEDY)
    engine.step()
    engine.cancel("waiting")
    engine.cancel("running")
    assert engine.step() == []
    assert_whole(engine)
    with pytest.raises(BadRequest, match="'running'"):
        engine.cancel("running")


def test_times_come_from_the_clock(manual_clock: object) -> None:
    engine = Engine(tiny_model(), EngineConfig(), clock=manual_clock)  # type: ignore[arg-type]
    engine.add_request("timed", PROMPTS[3], SamplingParams(tokens_max=2))
    manual_clock.advance(2.0)  # type: ignore[attr-defined]
    engine.step()
    manual_clock.advance(0.5)  # type: ignore[attr-defined]
    result = engine.step()[0].result
    assert result is not None
    assert (result.ttft_seconds, result.seconds) == (2.0, 2.5)


@pytest.mark.parametrize(
    ("prompt", "tokens_max", "message"),
    [
        ([], 1, "prompt is empty"),
        ([TINY.vocab_size], 1, "outside 0 .. 96"),
        ([-1], 1, "outside 0 .. 96"),
        ([1] * 250, 7, "257 tokens: there is room for 256"),
    ],
)
def test_request_that_could_never_run_is_refused(
    prompt: list[int], tokens_max: int, message: str
) -> None:
    engine = tiny_engine()
    with pytest.raises(BadRequest, match=message):
        engine.add_request("bad", prompt, SamplingParams(tokens_max=tokens_max))
    assert engine.unfinished_count == 0


def test_id_in_use_and_a_full_queue_are_refused() -> None:
    engine = tiny_engine(waiting_count_max=1)
    engine.add_request("one", [1])
    with pytest.raises(BadRequest, match="'one' is in use"):
        engine.add_request("one", [2])
    with pytest.raises(LimitExceeded, match="waiting_count_max 1"):
        engine.add_request("two", [2])
    assert engine.unfinished_count == 1


@pytest.mark.parametrize(
    "options",
    [{"device_block_count": 0}, {"step_tokens_max": 3, "running_count_max": 4}],
)
def test_impossible_config_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must be at least 1|each running request"):
        EngineConfig(**options)  # type: ignore[arg-type]
