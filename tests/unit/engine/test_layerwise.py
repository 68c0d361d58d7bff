"""Computing beside the load of the prefix: what it gives, and that what was in doubt is void."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtier.connector.jobs import JobResult
from kvtier.cuda.fake_timeline import Engine as Resource
from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.engine import TokenOutput
from kvtier.engine.onboards import Onboards
from kvtier.engine.request import Load, RequestResult
from tests.support.gpu_bench import GpuBench, WatchedClient
from tests.support.tiny_models import prompt_of, tiny_model, tokens_alone

CONFIG = EngineConfig(block_tokens=4, device_block_count=32, device="cuda", layerwise_loading=True)
PARAMS = SamplingParams(tokens_max=5)
PREFIX = prompt_of(20, seed=1)
PROMPT = [*PREFIX, *prompt_of(6, seed=2)]  # 6 full blocks, and 2 tokens.


def bench_of(client: WatchedClient | None = None, **options: int) -> GpuBench:
    return GpuBench(tiny_model(), replace(CONFIG, **options), client=client)  # type: ignore[arg-type]


@pytest.fixture
def filled() -> WatchedClient:
    """A daemon that has the prompt's blocks from another engine."""
    bench = bench_of()
    bench.engine.generate([PROMPT], SamplingParams(tokens_max=1))
    bench.close()
    return bench.client


def alone(prompt: list[int]) -> tuple[int, ...]:
    return tokens_alone(prompt, PARAMS)


def steps_until_load(bench: GpuBench) -> list[TokenOutput]:
    """The outputs of the step in which the load begins."""
    for _ in range(10):
        outputs = bench.engine.step()
        if (bench.client.calls["acquire"] and bench.scheduler.onboard_sources("r")) or outputs:
            return outputs
        bench.clock.advance(0.01)
    raise AssertionError("nothing is loaded")


def result_of(outputs: list[TokenOutput], bench: GpuBench) -> RequestResult:
    """Step on until the last token."""
    while outputs[-1:] == [] or outputs[-1].result is None:
        outputs += bench.engine.step()
        bench.engine._pause(0.0)
    result = outputs[-1].result
    assert result is not None
    return result


def test_the_step_that_begins_the_load_gives_the_first_token(filled: WatchedClient) -> None:
    bench = bench_of(filled)
    bench.engine.add_request("r", PROMPT, PARAMS)
    outputs = steps_until_load(bench)
    assert [output.token_id for output in outputs] == [alone(PROMPT)[0]]
    assert bench.gpu.read_count == 1
    result = result_of(outputs, bench)
    assert result.token_ids == alone(PROMPT)
    assert (result.kvtier_count, result.computed_count) == (24, 2)
    bench.close()


def test_layers_are_loaded_one_after_the_other_over_all_blocks(filled: WatchedClient) -> None:
    bench = bench_of(filled)
    bench.engine.add_request("r", PROMPT, PARAMS)
    result_of(steps_until_load(bench), bench)
    loads = [
        operation
        for operation in bench.cuda.timeline.history
        if operation.engine is Resource.HOST_TO_DEVICE
    ]
    layers = [part for part in bench.cuda.timeline.history if part.name.startswith("layer")][:2]
    assert len(loads) == 2  # As many as layers, for 6 blocks.
    assert [load.ended_at is not None for load in loads] == [True, True]
    for load, layer in zip(loads, layers, strict=True):
        assert load.ended_at is not None
        assert layer.started_at is not None
        assert load.ended_at <= layer.started_at
    bench.close()


def test_what_follows_a_prefix_is_cached_and_offloaded_after_the_verdict(
    filled: WatchedClient,
) -> None:
    turn = [*PROMPT, *prompt_of(7, seed=3)]
    bench = bench_of(filled)
    committed_count = len(filled.commits)
    assert bench.engine.generate([turn], PARAMS)[0].token_ids == alone(turn)
    assert bench.engine.wait_offloads(1.0)
    # 33 + 5 tokens, the last one's KV never computed: 9 blocks in all.
    assert len(filled.commits) == committed_count + 3
    again = bench.engine.generate([turn], PARAMS)[0]
    assert (again.engine_cache_count, again.kvtier_count) == (32, 0)
    bench.close()


def test_a_rest_longer_than_a_step_goes_on_after_the_verdict(filled: WatchedClient) -> None:
    turn = [*PROMPT, *prompt_of(30, seed=3)]
    bench = bench_of(filled, step_tokens_max=8, running_count_max=8)
    result = bench.engine.generate([turn], PARAMS)[0]
    assert result.token_ids == alone(turn)
    assert result.kvtier_count == 24
    bench.close()


def test_several_loads_are_computed_beside_in_one_step(filled: WatchedClient) -> None:
    prompts = [PROMPT, [*PREFIX, 1, 2, 3], [*PREFIX, 5], prompt_of(9, seed=9)]
    bench = bench_of(filled)
    results = bench.engine.generate(prompts, PARAMS)
    assert [result.token_ids for result in results] == [alone(prompt) for prompt in prompts]
    assert [result.kvtier_count for result in results] == [24, 20, 20, 0]
    bench.close()


# ------------------------------------------------------------------------------------ late or wrong


def spoil_loads(bench: GpuBench) -> None:
    """Once a load is begun its deadline passes, and the daemon gives the slots to others."""

    def before_launch() -> None:
        leased = [slot for slots in bench.client.leases.values() for slot in slots]
        if bench.client.open_hold_count and leased and not bench.lane._under_way:
            bench.clock.advance(31.0)
            bench.client.memory[0][leased] = 0x3F

    bench.gpu.before_launch = before_launch
    # A load that is late for whatever reason; all of its bytes are those of others.
    bench.worker.watch.differing = lambda result: []  # type: ignore[method-assign]


def run_late(
    filled: WatchedClient, params: SamplingParams = PARAMS
) -> tuple[GpuBench, RequestResult]:
    bench = bench_of(filled)
    spoil_loads(bench)
    bench.engine.add_request("r", PROMPT, params)
    committed_count = len(filled.commits)
    outputs = steps_until_load(bench)
    assert len(filled.commits) == committed_count
    return bench, result_of(outputs, bench)


def test_a_load_that_ends_too_late_voids_the_step_beside_it(filled: WatchedClient) -> None:
    bench, result = run_late(filled)
    assert result.token_ids == alone(PROMPT)
    assert (result.kvtier_count, result.computed_count) == (0, 26)
    assert bench.scheduler.stats().onboard_failed_blocks == 6
    assert bench.gpu.read_count == 1 + 5, "one step's tokens were thrown away"
    bench.close()


def test_a_void_step_uses_up_no_draw(filled: WatchedClient) -> None:
    params = SamplingParams(tokens_max=8, temperature=1.0, seed=5)
    bench, result = run_late(filled, params)
    assert bench.scheduler.stats().onboard_failed_blocks == 6
    assert result.token_ids == tokens_alone(PROMPT, params)
    bench.close()


def test_an_engine_that_takes_late_loads_gives_wrong_tokens(
    filled: WatchedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test before must be able to tell."""
    end = Onboards.end
    monkeypatch.setattr(Onboards, "end", lambda self, name, load: end(self, name, Load.GOOD))
    _, result = run_late(filled)
    assert result.token_ids != alone(PROMPT)


def test_a_load_that_cannot_begin_costs_no_step(filled: WatchedClient) -> None:
    bench = bench_of(filled)
    bench.engine.add_request("r", PROMPT, PARAMS)
    bench.client.refused.add(filled.session)  # type: ignore[arg-type]
    outputs = steps_until_load(bench)
    result = result_of(outputs, bench)
    assert result.token_ids == alone(PROMPT)
    assert result.kvtier_count == 0
    assert bench.gpu.read_count == 5
    bench.client.refused.clear()
    bench.close()


def hold_verdicts(bench: GpuBench) -> Callable[[], None]:
    """Reports of copies do not arrive until the function that is returned is called."""
    poll = bench.worker.poll
    held: list[JobResult] = []

    def wait() -> list[JobResult]:
        held.extend(poll())
        return []

    def go_on() -> None:
        bench.worker.poll = lambda: held + poll()  # type: ignore[method-assign]
        bench.engine._exchange()
        bench.worker.poll = poll  # type: ignore[method-assign]

    bench.worker.poll = wait  # type: ignore[method-assign]
    return go_on


def test_without_a_verdict_no_token_is_given_out_and_nothing_cached(
    filled: WatchedClient,
) -> None:
    bench = bench_of(filled)
    go_on = hold_verdicts(bench)
    bench.engine.add_request("r", PROMPT, PARAMS)
    assert steps_until_load(bench) == []
    assert bench.gpu.read_count == 1
    for _ in range(3):
        assert bench.engine.step() == []
    assert bench.engine.scheduler.pool.cached_count == 0
    assert bench.gpu.read_count == 1
    go_on()
    result = result_of([], bench)
    assert result.token_ids == alone(PROMPT)
    assert result.kvtier_count == 24
    bench.close()


def test_others_run_while_a_verdict_is_awaited(filled: WatchedClient) -> None:
    bench = bench_of(filled)
    go_on = hold_verdicts(bench)
    bench.engine.add_request("r", PROMPT, PARAMS)
    assert steps_until_load(bench) == []
    other = prompt_of(9, seed=9)
    bench.engine.add_request("other", other, PARAMS)
    outputs = [output for _ in range(5) for output in bench.engine.step()]
    assert tuple(output.token_id for output in outputs) == alone(other)
    go_on()
    assert result_of([], bench).token_ids == alone(PROMPT)
    bench.close()


def test_a_request_cancelled_before_the_verdict_keeps_its_blocks_till_then(
    filled: WatchedClient,
) -> None:
    bench = bench_of(filled)
    go_on = hold_verdicts(bench)
    bench.engine.add_request("r", PROMPT, PARAMS)
    assert steps_until_load(bench) == []
    bench.engine.cancel("r")
    assert bench.engine.scheduler.tables.kept_count == 7
    assert bench.engine.step() == []
    go_on()
    assert bench.engine.step() == []
    assert bench.engine.scheduler.pool.cached_count == 0
    bench.close()


def test_without_room_for_the_rest_the_load_is_waited_for(filled: WatchedClient) -> None:
    bench = bench_of(filled, device_block_count=8)
    holder = prompt_of(4, seed=8)
    bench.engine.add_request("holder", holder, SamplingParams(tokens_max=3))
    bench.engine.step()
    result = bench.engine.generate([PROMPT], SamplingParams(tokens_max=1))[0]
    assert result.token_ids == alone(PROMPT)[:1]
    assert result.kvtier_count == 24
    bench.close()


def test_in_host_memory_it_is_refused() -> None:
    with pytest.raises(ValueError, match="layerwise_loading needs a GPU"):
        EngineConfig(layerwise_loading=True)
