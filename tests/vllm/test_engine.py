"""Real engines, one after the other, on one daemon."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.daemon import RunningDaemon
from tests.support.nvme_daemon import make_pool, running_nvme_daemon, wait_metric
from tests.vllm.engines import (
    Generated,
    VllmEngine,
    generated,
    greedy,
    prompt_of,
    transfer_config,
    vllm_engine,
)
from tests.vllm.identity import differing
from tests.vllm.versions import needs_engine

pytestmark = [pytest.mark.vllm, needs_engine, pytest.mark.timeout(300)]

# How long after its deadline a hook may return, on cores that others use as well.
HOOK_SECONDS, HOOK_SLACK_SECONDS = 0.05, 0.02


def thirty_prompts() -> list[list[int]]:
    """Three families with shared beginnings of several lengths."""
    rng = random.Random(7)
    families = [prompt_of(200, seed=family) for family in range(3)]
    return [
        families[number % 3][: rng.choice((32, 64, 100, 160))] + prompt_of(40, seed=number)
        for number in range(30)
    ]


@contextmanager
def kvtier_engine(
    model: Path, daemon: RunningDaemon, *, extra: dict[str, Any] | None = None, **options: Any
) -> Iterator[VllmEngine]:
    # A machine that is busy with other tests must not turn hits into misses.
    wishes = {"onboard_wait_seconds": 2.0, "nvme_wait_seconds_min": 2.0} | (extra or {})
    wishes = {"nvme_wait_seconds_max": 10.0} | wishes
    with vllm_engine(model, transfer_config(daemon.socket, **wishes), **options) as engine:
        engine.wait_ready()
        yield engine


def scribble(engine: VllmEngine, prompt: list[int]) -> None:
    """Other KV in the prompt's first block, in the daemon's memory."""
    worker = engine.connector_of_worker()._worker
    client = engine.connector._scheduler._client
    request = engine.llm.llm_engine.engine_core.engine_core.request_block_hasher
    from vllm.v1.request import Request

    hashes = Request("x", prompt, greedy(1), None, block_hasher=request).block_hashes
    namespace = client.open_namespace(worker._spec)
    lease = client.acquire(namespace, hashes[:1], lease_seconds=5.0)
    assert lease.leased_count == 1
    arena = worker._client.arena(worker._client.open_namespace(worker._spec))
    view = arena.view(int(lease.slots[0]), lease.session).view(np.uint16)
    view[:] = np.roll(view, 1111)
    client.release([lease])


@pytest.mark.parametrize("name", ["tiny_llama", "smollm2"])
def test_outputs_are_the_same_with_kvtier_and_other_with_one_corrupt_block(
    name: str, daemon: RunningDaemon, request: pytest.FixtureRequest
) -> None:
    model, prompts = request.getfixturevalue(name), thirty_prompts()
    with vllm_engine(model) as engine:
        alone = engine.generate(prompts)
    with kvtier_engine(model, daemon) as engine:
        first = engine.generate(prompts)
        engine.settle()
    with kvtier_engine(model, daemon) as engine:
        second = engine.generate(prompts)
        assert engine.stats.onboarded_blocks > 30
        engine.settle()
    assert differing(alone, first) == []
    assert differing(alone, second) == []
    with kvtier_engine(model, daemon) as engine:
        scribble(engine, prompts[0])
        third = engine.generate(prompts[:10])
        engine.settle()
    assert differing(alone[:10], third) != []


def test_engine_started_again_computes_the_tail_alone(
    tiny_llama: Path, daemon: RunningDaemon
) -> None:
    prompts = [prompt_of(100), prompt_of(100, seed=1, shared=64), prompt_of(170, seed=2)]
    with kvtier_engine(tiny_llama, daemon) as engine:
        first = engine.generate(prompts)
        engine.settle()
    with kvtier_engine(tiny_llama, daemon) as engine:
        second = engine.generate(prompts)
        engine.settle()
        assert engine.stats.onboarded_blocks >= 3 + 1 + 5  # Two blocks are shared.
    assert differing(first, second) == []
    assert [g.cached_count for g in second] == [96, 96, 160]


def test_engine_offloads_and_onboards_again_after_a_reset(
    tiny_llama: Path, daemon: RunningDaemon
) -> None:
    """In a namespace that its worker had not mapped; and it comes to rest."""
    prompts = [prompt_of(100), prompt_of(170, seed=2)]
    with kvtier_engine(tiny_llama, daemon) as engine:
        first = engine.generate(prompts)
        engine.settle()
        before = engine.stats
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        second = engine.generate(prompts)
        engine.settle()
        assert engine.stats.onboarded_blocks == before.onboarded_blocks, "old KV was used"
        assert engine.stats.committed_blocks >= before.committed_blocks + 3 + 5
        engine.forget_own_cache()
        third = engine.generate(prompts)
        engine.settle()
        assert engine.stats.onboarded_blocks == before.onboarded_blocks + 3 + 5
        assert engine.left_behind() == []
    assert differing(first, second) == differing(first, third) == []


def test_daemon_killed_between_has_it_on_nvme(tiny_llama: Path, tmp_path: Path) -> None:
    prompts = [prompt_of(100), prompt_of(170, seed=2)]
    pool = tmp_path / "pool"
    make_pool(pool)
    with running_nvme_daemon(pool) as daemon:
        with kvtier_engine(tiny_llama, daemon) as engine:
            first = engine.generate(prompts)
            engine.settle()
        wait_metric(daemon, 'kvtier_tier_blocks{tier="nvme"}', 3 + 5)
        time.sleep(0.5)  # The slot table is written every 0.05 s.
        daemon.restart()
        with kvtier_engine(tiny_llama, daemon) as engine:
            second = engine.generate(prompts)
            engine.settle()
            assert engine.stats.onboarded_tier_blocks == {"nvme": 3 + 5}
    assert differing(first, second) == []
    assert [g.cached_count for g in second] == [96, 160]


def test_preemption_under_few_device_blocks_changes_nothing(
    tiny_llama: Path, daemon: RunningDaemon
) -> None:
    prompts = [prompt_of(130, seed=seed) for seed in range(4)]
    with vllm_engine(tiny_llama) as engine:
        alone = engine.generate(prompts, tokens=120)
    with kvtier_engine(tiny_llama, daemon, num_gpu_blocks_override=18) as engine:
        tight = engine.generate(prompts, tokens=120)
        engine.settle()
        preempted = {m.name: m for m in engine.llm.get_metrics()}["vllm:num_preemptions"].value
        assert preempted > 0
    assert differing(alone, tight) == []


def test_two_hundred_aborts_leave_nothing_behind(tiny_llama: Path, daemon: RunningDaemon) -> None:
    rng = random.Random(3)
    with kvtier_engine(tiny_llama, daemon) as engine:
        engine.generate([prompt_of(170, seed=seed) for seed in range(4)])
        engine.settle()
        engine.forget_own_cache()
        live: list[str] = []
        for number in range(200):
            name = f"r{number}"
            prompt = {"prompt_token_ids": prompt_of(rng.randint(20, 250), seed=number % 6)}
            engine.llm.llm_engine.add_request(name, prompt, greedy(30))
            live.append(name)
            for _ in range(rng.randint(0, 2)):
                engine.llm.llm_engine.step()
            if rng.random() < 0.9 or len(live) > 8:
                engine.llm.llm_engine.abort_request([live.pop(rng.randrange(len(live)))])
            if rng.random() < 0.05:
                engine.llm.reset_prefix_cache()
        engine.llm.llm_engine.abort_request(live)
        engine.settle()
        assert engine.left_behind() == []
        deadline = time.monotonic() + 10
        while found := daemon_holds(engine):
            assert time.monotonic() < deadline, found
            engine.core.step_fn()
            time.sleep(0.01)


def daemon_holds(engine: VllmEngine) -> dict[str, int]:
    """What the daemon still keeps for this engine, beyond the stock of reserved slots."""
    side = engine.connector._scheduler
    sessions = side._client.stats().sessions
    held = {
        "leases": sum(session.lease_count for session in sessions),
        "slots": sum(session.reserved_count for session in sessions) - side._core.stock_count,
    }
    return {name: count for name, count in held.items() if count}


class Stopwatch:
    """The longest call of each hook, by replacing the methods of one object."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}

    def watch(self, owner: object) -> None:
        for name in dir(owner):
            method = getattr(owner, name)
            if not name.startswith("_") and callable(method) and name != "shutdown":
                setattr(owner, name, self._timed(name, method))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            try:
                return method(*args, **kwargs)
            finally:
                seconds = time.monotonic() - start
                self.longest[name] = max(seconds, self.longest.get(name, 0.0))

        return run


@pytest.mark.parametrize("trouble", ["kill", "stop"])
def test_daemon_that_dies_or_hangs_in_mid_load_costs_no_answer(
    tiny_llama: Path, daemon: RunningDaemon, trouble: str
) -> None:
    prompts = [prompt_of(300, seed=seed) for seed in range(4)]
    with kvtier_engine(tiny_llama, daemon) as engine:
        first = engine.generate(prompts)
        engine.settle()
    wait = {"onboard_wait_seconds": HOOK_SECONDS}
    with kvtier_engine(tiny_llama, daemon, extra=wait) as engine:
        watch = Stopwatch()
        watch.watch(engine.connector)
        watch.watch(engine.connector_of_worker())
        slow_down(engine)
        for number, prompt in enumerate(prompts):
            engine.llm.llm_engine.add_request(f"{number}", {"prompt_token_ids": prompt}, greedy(8))
        finished: dict[str, Generated] = {}
        is_done = False
        deadline = time.monotonic() + 60
        while engine.llm.llm_engine.has_unfinished_requests():
            assert time.monotonic() < deadline
            for output in engine.llm.llm_engine.step():
                if output.finished:
                    finished[output.request_id] = generated(output)
            if not is_done and engine.connector._scheduler._loading:
                daemon.kill() if trouble == "kill" else daemon.stop()
                is_done = True
        assert is_done
        assert differing(first, [finished[str(n)] for n in range(4)]) == []
        if trouble == "stop":
            daemon.resume()
        slow = {k: v for k, v in watch.longest.items() if v > HOOK_SECONDS + HOOK_SLACK_SECONDS}
        assert slow == {}


def slow_down(engine: VllmEngine) -> None:
    """Every copy takes a while, so that it is under way when something happens."""
    copier = engine.connector_of_worker()._worker._worker._blocks._copier
    copy_in = copier.copy_in

    def slow_copy_in(*args: Any) -> None:
        time.sleep(0.05)
        copy_in(*args)

    copier.copy_in = slow_copy_in


def test_engine_without_a_daemon_serves_on_and_finds_it_later(
    tiny_llama: Path, daemon: RunningDaemon
) -> None:
    prompts = [prompt_of(100)]
    with kvtier_engine(tiny_llama, daemon) as engine:
        first = engine.generate(prompts)
        engine.settle()
    daemon.kill()
    with vllm_engine(tiny_llama, transfer_config(daemon.socket)) as engine:
        assert differing(first, engine.generate(prompts)) == []
        daemon.start()
        engine.wait_ready()
        engine.generate(prompts, tokens=40)
        engine.settle()
        assert engine.stats.committed_blocks > 0
