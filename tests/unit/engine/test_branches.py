"""Several answers to one prompt: each is as if it were alone, and only what must be is copied."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.engine import Engine
from kvtier.engine.request import FinishReason, RequestResult
from kvtier.errors import BadRequest
from tests.support.beam_model import CopyingBeams
from tests.support.memory_connector import MemoryBlocks, connected_engine
from tests.support.tiny_models import prompt_of, tiny_engine, tiny_model, tokens_alone
from tests.support.transformers_twin import to_transformers

SAMPLES = SamplingParams(tokens_max=9, temperature=1.0, seed=3, sample_count=4)
BEAMS = SamplingParams(tokens_max=9, beam_width=4)


def held_count(engine: Engine) -> int:
    return engine.config.device_block_count - engine.scheduler.pool.free_count


def run(engine: Engine, prompt: list[int], params: SamplingParams) -> RequestResult:
    result = engine.generate([prompt], params)[0]
    assert engine.check_invariants() == []
    assert held_count(engine) == 0
    return result


def alone(prompt: list[int], seed: int) -> tuple[int, ...]:
    params = SamplingParams(tokens_max=SAMPLES.tokens_max, temperature=1.0, seed=seed)
    return tokens_alone(prompt, params)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(("count", "copied"), [(13, 3), (16, 0), (15, 3), (1, 3)])
def test_each_sample_is_that_of_its_seed_alone_and_all_but_one_copy_the_tail(
    count: int, copied: int
) -> None:
    engine, prompt = tiny_engine(), prompt_of(count, seed=count)
    result = run(engine, prompt, SAMPLES)
    drawn = [sample.token_ids for sample in result.samples]
    assert drawn == [alone(prompt, 3 + index) for index in range(4)]
    assert engine.scheduler.tables.copied_count == copied


def test_eight_samples_of_a_long_prompt_hold_hardly_more_blocks_than_one() -> None:
    def most_held(sample_count: int) -> int:
        params = SamplingParams(tokens_max=8, temperature=1.0, sample_count=sample_count)
        engine = tiny_engine(block_tokens=8, device_block_count=96, step_tokens_max=128)
        engine.add_request("long", prompt_of(504), params)
        most = 0
        while engine.unfinished_count:
            engine.step()
            most = max(most, held_count(engine))
        return most

    assert most_held(8) <= 1.15 * most_held(1)


@pytest.mark.usefixtures("everywhere")
def test_greedy_samples_and_beams_share_a_batch_and_give_what_they_give_alone() -> None:
    prompts = [prompt_of(count, seed=count) for count in (9, 14, 18)]
    kinds = [SamplingParams(tokens_max=9), SAMPLES, BEAMS]
    expected = [
        run(tiny_engine(), prompt, params) for prompt, params in zip(prompts, kinds, strict=True)
    ]
    engine = tiny_engine(step_tokens_max=16, running_count_max=16)
    for name, prompt, params in zip("abc", prompts, kinds, strict=True):
        engine.add_request(name, prompt, params)
    results = {}
    while engine.unfinished_count:
        results |= {one.request_id: one.result for one in engine.step() if one.result}
        assert engine.check_invariants() == []
    for name, one in zip("abc", expected, strict=True):
        tokens = [sample.token_ids for sample in one.samples]
        assert [sample.token_ids for sample in results[name].samples] == tokens
    assert held_count(engine) == 0


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    ("params", "caching"), [(SAMPLES, False), (BEAMS, True)], ids=["samples", "beams"]
)
def test_branches_that_are_preempted_give_the_same_answers(
    params: SamplingParams, caching: bool
) -> None:
    prompts = [prompt_of(count, seed=count) for count in (13, 14, 11, 12)]
    expected = [run(tiny_engine(), prompt, params).samples for prompt in prompts]
    engine = tiny_engine(device_block_count=24, prefix_caching=caching)
    results = engine.generate(prompts, params)
    assert sum(result.preempted_count for result in results) > 0
    for result, samples in zip(results, expected, strict=True):
        assert [one.token_ids for one in result.samples] == [one.token_ids for one in samples]
    assert engine.check_invariants() == []


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("params", [SAMPLES, BEAMS], ids=["samples", "beams"])
def test_branches_go_through_kvtier_as_any_request(params: SamplingParams) -> None:
    prompts = [prompt_of(count, seed=count) for count in (13, 14)]
    expected = [run(tiny_engine(), prompt, params).samples for prompt in prompts]
    config, blocks = EngineConfig(block_tokens=4, device_block_count=24), MemoryBlocks(copy_polls=3)
    engine = connected_engine(tiny_model(), config, blocks)
    results = engine.generate(prompts, params)
    for result, samples in zip(results, expected, strict=True):
        assert [one.token_ids for one in result.samples] == [one.token_ids for one in samples]
    assert engine.wait_offloads(1.0)
    assert blocks.overwritten == []
    assert engine.check_invariants() == []
    assert held_count(engine) == 0


def search(prompt: list[int], width: int, steps: int, block_tokens: int) -> None:
    """Step by step beside the model: the same tokens, and the blocks of a perfect sharer."""
    engine = tiny_engine(block_tokens=block_tokens, device_block_count=600 // block_tokens + 8)
    model = CopyingBeams(tiny_model(), prompt, width, block_tokens)
    params = SamplingParams(tokens_max=steps, beam_width=width)
    engine.add_request("beams", prompt, params)
    outputs = engine.step()
    for _ in range(steps - 1):
        model.advance()
        [leader] = engine._requests.values()
        assert leader.group is not None
        assert [tuple(one.token_ids) for one in leader.group.live] == [
            b.tokens for b in model.beams
        ]
        assert engine.check_invariants() == []
        assert held_count(engine) == model.block_count(), "a block is held that no beam reaches"
        outputs = engine.step()
    model.advance()
    result = outputs[-1].result
    assert result is not None
    best = [beam.tokens[len(prompt) :] for beam in model.beams]
    assert [sample.token_ids for sample in result.samples] == best
    assert held_count(engine) == 0


def test_beam_search_holds_and_copies_what_a_perfect_sharer_would() -> None:
    prompt = prompt_of(10, seed=1)
    engine = tiny_engine()
    model = CopyingBeams(tiny_model(), prompt, 4, 4)
    engine.generate([prompt], SamplingParams(tokens_max=12, beam_width=4))
    for _ in range(11):  # The last choice is not computed on.
        model.advance()
    assert engine.scheduler.tables.copied_count == model.copied_count > 0
    search(prompt, width=4, steps=12, block_tokens=4)


@pytest.mark.slow
def test_four_beams_over_128_steps_never_hold_an_unreachable_block() -> None:
    search(prompt_of(21, seed=2), width=4, steps=128, block_tokens=4)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    count=st.integers(1, 20),
    width=st.integers(2, 5),
    steps=st.integers(2, 10),
    block_tokens=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_any_search_is_that_of_the_model(
    count: int, width: int, steps: int, block_tokens: int, seed: int
) -> None:
    search(prompt_of(count, seed=seed), width, steps, block_tokens)


@pytest.mark.slow
def test_beams_are_those_of_transformers() -> None:
    prompt = prompt_of(14, seed=6)
    twin = to_transformers(tiny_model())
    found = twin.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=9,
        length_penalty=0.0,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    expected = [tuple(row[len(prompt) :]) for row in found.tolist()]
    assert [one.token_ids for one in run(tiny_engine(), prompt, BEAMS).samples] == expected


def test_beam_that_stops_is_an_answer_and_the_search_ends_when_none_can_be_likelier() -> None:
    prompt = prompt_of(10, seed=1)
    free = run(tiny_engine(), prompt, SamplingParams(tokens_max=6, beam_width=3))
    stops = frozenset(sample.token_ids[2] for sample in free.samples)
    params = SamplingParams(tokens_max=60, beam_width=3, stop_token_ids=stops)
    result = run(tiny_engine(), prompt, params)
    scores = [sample.log_probability for sample in result.samples]
    assert all(first >= second for first, second in pairwise(scores))
    assert {sample.finish_reason for sample in result.samples} == {FinishReason.STOP}
    assert all(sample.token_ids[-1] in stops for sample in result.samples)
    assert all(len(sample.token_ids) < 60 for sample in result.samples)


@pytest.mark.parametrize("params", [SAMPLES, BEAMS], ids=["samples", "beams"])
def test_cancelled_group_frees_all_its_blocks(params: SamplingParams) -> None:
    engine = tiny_engine()
    engine.add_request("group", prompt_of(13), params)
    for _ in range(3):
        engine.step()
    engine.cancel("group")
    assert (engine.unfinished_count, held_count(engine)) == (0, 0)
    assert engine.check_invariants() == []


def test_samples_stream_with_their_index_and_their_end() -> None:
    engine = tiny_engine()
    engine.add_request("group", prompt_of(13), SAMPLES)
    outputs = []
    while engine.unfinished_count:
        outputs += engine.step()
    result = outputs[-1].result
    assert result is not None
    for index, sample in enumerate(result.samples):
        given_out = [one for one in outputs if one.index == index]
        assert tuple(one.token_id for one in given_out) == sample.token_ids
        ends = [one.finish_reason for one in given_out]
        assert ends == [None] * 8 + [FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("options", "params", "message"),
    [
        ({"running_count_max": 3}, SAMPLES, "4 samples at once are more than running_count_max 3"),
        ({"device_block_count": 10}, BEAMS, "may need 15 device blocks, there are 10"),
    ],
)
def test_group_that_could_never_run_is_refused(
    options: dict[str, int], params: SamplingParams, message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        tiny_engine(**options).add_request("group", prompt_of(13), params)


def test_stream_of_several_samples_is_refused() -> None:
    with pytest.raises(BadRequest, match="a stream is of one sample"):
        tiny_engine().stream(prompt_of(13), SAMPLES)


@pytest.mark.parametrize(
    "options",
    [{"sample_count": 0}, {"beam_width": 0}, {"beam_width": 2, "temperature": 1.0},
     {"beam_width": 2, "sample_count": 2}],
)  # fmt: skip
def test_impossible_params_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|beam search draws nothing"):
        SamplingParams(**options)  # type: ignore[arg-type]
