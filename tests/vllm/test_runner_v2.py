"""The worker side under Model Runner V2; what its order of calls is, is told in runner_v2."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from tests.support.forms import rounds
from tests.vllm.runner_v2 import CallLog, Forward, RunnerV2, RunnerV2Rig
from tests.vllm.scheduler_rig import BLOCK_TOKENS, SchedulerRig, prompt_of
from tests.vllm.test_machine import Story
from tests.vllm.versions import HAS_HIT_SOURCES, needs_transfer_results

pytestmark = [pytest.mark.vllm, needs_transfer_results]

CAN_PUT_OFF = "defer_finalize" in inspect.signature(ActiveKVConnector.post_forward).parameters


def output_of(*, tokens: int, has_sync_kv_loads: bool) -> Any:
    return SimpleNamespace(
        kv_connector_metadata=object(),
        has_sync_kv_loads=has_sync_kv_loads,
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens={"r": tokens} if tokens else {},
        finished_req_ids=set(),
    )


class TheirRunner:
    """The class of the vLLM that is installed, called as its runner calls it."""

    def __init__(self, log: CallLog, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", log)
        self.log = log
        self.config = config
        self.active = ActiveKVConnector(config, {})

    def step(self, output: Any, *, form: Forward, has_drafter: bool) -> None:
        active = self.active
        if output.total_num_scheduled_tokens == 0:
            active.no_forward(output)
            return
        batch: Any = SimpleNamespace(idx_mapping=None, req_ids=["r"], num_tokens=1)
        if form is Forward.GRAPH:
            active.pre_forward(output, batch, attn_metadata={})
        else:
            with set_forward_context(None, self.config):
                active.pre_forward(output, batch)
                self.log.wait_for_layer_load("layer0")
                self.log.save_kv_layer("layer0", None, None)
        active.finish_forward()
        if has_drafter:
            active.post_forward(set(), defer_finalize=True)
            active.finalize_step()
        else:
            active.post_forward(set())


@pytest.mark.skipif(not HAS_HIT_SOURCES, reason="what the runner passes on is that of 0.32")
@pytest.mark.parametrize("has_sync_kv_loads", [False, True])
@pytest.mark.parametrize("form", list(Forward))
@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("has_drafter", [False, True])
def test_replayed_calls_are_those_of_the_installed_vllm(
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_sync_kv_loads: bool,
    form: Forward,
    tokens: int,
    has_drafter: bool,
) -> None:
    if has_drafter and not CAN_PUT_OFF:
        pytest.skip("finishing a step after a drafter came with vLLM 0.33")
    output = output_of(tokens=tokens, has_sync_kv_loads=has_sync_kv_loads)
    ours, theirs = CallLog(), CallLog()
    replay = RunnerV2(ours)
    replay.begin({})
    replay.captured()
    replay.step(output, form=form, has_drafter=has_drafter)
    runner = TheirRunner(theirs, SchedulerRig(tiny_llama).config, monkeypatch)
    runner.active.reset_capture_state()
    runner.step(output, form=form, has_drafter=has_drafter)
    assert ours.calls == theirs.calls


def test_order_of_a_step_that_ends_after_its_drafter() -> None:
    """What the installed vLLM may not show yet."""
    log = CallLog()
    output = output_of(tokens=1, has_sync_kv_loads=False)
    RunnerV2(log).step(output, form=Forward.GRAPH, has_drafter=True)
    assert [name for name, _ in log.calls] == [
        *("handle_preemptions", "bind_connector_metadata", "finish_forward", "start_load_kv"),
        *("get_transfer_results", "get_block_ids_with_load_errors", "get_kv_connector_stats"),
        *("get_kv_connector_kv_cache_events", "build_connector_worker_meta"),
        *("wait_for_save", "clear_connector_metadata"),
    ]


def rig_of(model: Path, **options: Any) -> RunnerV2Rig:
    return RunnerV2Rig(model, random=random.Random(5), **options)


WAYS = [
    pytest.param({"in_flight_max": 1}, id="one-step"),
    pytest.param({"in_flight_max": 2}, id="two-steps"),
    pytest.param({"in_flight_max": 2, "has_drafter": True}, id="two-steps-drafter"),
]


def check_told_once(rig: RunnerV2Rig, promised: Counter[str]) -> None:
    """Each load's end exactly once for each promise, and of nothing else."""
    assert Counter(rig.told) == promised


def promises_of(rig: RunnerV2Rig) -> Counter[str]:
    """Loads that vLLM was promised, counted at the hook that promises them."""
    promised: Counter[str] = Counter()
    on_allocated = rig.side.on_allocated

    def count(request: Any, blocks: Any, tokens: int) -> None:
        promised[request.request_id] += tokens > 0
        on_allocated(request, blocks, tokens)

    rig.side.on_allocated = count
    return promised


@pytest.mark.parametrize("way", WAYS)
def test_restarted_engine_loads_between_steps_and_hears_of_each_load_once(
    tiny_llama: Path, way: dict[str, Any]
) -> None:
    rig = rig_of(tiny_llama, **way)
    for number in range(4):
        rig.add(f"a{number}", prompt_of(100, seed=number), tokens=30)
    rig.run()
    rig.check_nothing_left()
    rig.restart()
    promised = promises_of(rig)
    for number in range(4):
        rig.add(f"b{number}", prompt_of(100, seed=number), tokens=30)
    rig.run()
    assert rig.core.stats().onboarded_blocks == 4 * 6
    assert +promised == Counter({f"b{number}": 1 for number in range(4)})
    check_told_once(rig, +promised)
    rig.check_nothing_left()


@pytest.mark.parametrize("way", WAYS)
def test_what_was_generated_is_stored_as_far_as_its_tokens_are_known(
    tiny_llama: Path, way: dict[str, Any]
) -> None:
    """With two steps at a time a block is full on the device before its last token is told."""
    rig = rig_of(tiny_llama, **way)
    first = rig.add("first", prompt_of(40), tokens=30)
    rig.run()
    conversation = list(first.all_token_ids)
    rig.restart()
    rig.add("second", [*conversation, 5, 6, 7], tokens=1)
    rig.run()  # Checks what is in the daemon, and what is built on.
    assert rig.core.stats().onboarded_blocks == (len(conversation) - 1) // BLOCK_TOKENS
    rig.check_nothing_left()


@pytest.mark.parametrize("way", WAYS)
def test_failed_load_is_told_once_and_computed(tiny_llama: Path, way: dict[str, Any]) -> None:
    rig = rig_of(tiny_llama, **way)
    rig.add("a", prompt_of(100))
    rig.run()
    rig.restart()
    promised = promises_of(rig)
    rig.copier.failures = 1
    request = rig.add("b", prompt_of(100), tokens=3)
    rig.run()
    assert request.status.name == "FINISHED_LENGTH_CAPPED"
    check_told_once(rig, +promised)
    rig.check_nothing_left()


@pytest.mark.parametrize("way", WAYS)
def test_load_of_an_aborted_request_is_told_once(tiny_llama: Path, way: dict[str, Any]) -> None:
    rig = rig_of(tiny_llama, **way)
    rig.add("a", prompt_of(100))
    rig.run()
    rig.restart()
    promised = promises_of(rig)
    rig.add("b", prompt_of(100))
    while not rig.lane.copies:
        rig.step(copies=False)
    rig.abort("b")
    for _ in range(3):
        rig.step(copies=False)
    assert rig.told == []
    rig.run()
    check_told_once(rig, +promised)
    assert rig.told == ["b"]
    rig.check_nothing_left()


@pytest.mark.parametrize("way", WAYS)
def test_preempted_request_that_comes_back_as_a_new_one_is_stored_and_loaded_rightly(
    tiny_llama: Path, way: dict[str, Any]
) -> None:
    rig = rig_of(tiny_llama, device_block_count=14, **way)
    promised = promises_of(rig)
    requests = [rig.add(f"r{n}", prompt_of(60, seed=n), tokens=80) for n in range(3)]
    rig.run(limit=2000)
    assert sum(r.num_preemptions for r in requests) > 0
    assert rig.core.stats().onboarded_blocks > 0
    check_told_once(rig, +promised)
    rig.check_nothing_left()


def test_block_that_another_request_fills_in_the_same_step_is_not_offloaded_before_that(
    tiny_llama: Path,
) -> None:
    """vLLM gives one request's blocks to another that is scheduled with it; found by a story."""
    rig = rig_of(tiny_llama, in_flight_max=1, scheduling={"max_num_batched_tokens": 24})
    rig.add("warm", prompt_of(20, seed=9))
    rig.run()
    rig.runner.between = rig.lane.step  # Copies are quicker than a forward pass.
    first = rig.add("first", prompt_of(40))
    while first.num_computed_tokens == 0:
        rig.step()
    assert first.num_computed_tokens == 24, "a block and a half"
    rig.add("second", prompt_of(40))
    rig._answer()  # Nobody has the prefix, and slots are there: all that is full may be offloaded.
    output = rig.step()  # Checks what is in the daemon.
    assert [new.num_computed_tokens for new in output.scheduled_new_reqs] == [2 * BLOCK_TOKENS]
    rig.run()
    rig.check_nothing_left()


class StoryV2(Story):
    """As in test_machine, on an engine with a V2 runner."""

    def make_rig(self, model: Path, **options: Any) -> SchedulerRig:
        pick = self.random.choice
        return RunnerV2Rig(
            model,
            in_flight_max=pick((1, 2, 2)),
            has_drafter=pick((False, True)),
            random=self.random,
            **options,
        )

    def reset(self) -> None:
        """vLLM refuses that, too, while a step under way or an ended load holds blocks."""
        assert isinstance(self.rig, RunnerV2Rig)
        while self.rig.in_flight:
            self.rig.handle_output()
        weights = self.rig.weights
        try:
            super().reset()
        except RuntimeError:
            self.rig.weights = weights


@pytest.mark.full_form
@pytest.mark.parametrize("seed", range(rounds(short=12, full=500)))
def test_no_wrong_kv_and_nothing_left_behind_under_v2(tiny_llama: Path, seed: int) -> None:
    StoryV2(tiny_llama, seed).run()
