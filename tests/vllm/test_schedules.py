"""vLLM's real Scheduler with our scheduler side, under schedules that hypothesis draws.

Beside the seeded stories of test_machine, which are longer and of one kind: a schedule that fails
here comes back as short as hypothesis can make it, and `Books` looks for whatever is told twice.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.forms import is_torture, rounds, state_finding
from tests.vllm.books import Books
from tests.vllm.grouped_rig import GroupedRig, full, window
from tests.vllm.runner_v2 import RunnerV2Rig
from tests.vllm.scheduler_rig import (
    BLOCK_TOKENS,
    SchedulerRig,
    prompt_of,
    transfer_config,
    with_settings,
)
from tests.vllm.test_multi_machine import OtherRig
from tests.vllm.versions import needs_transfer_results

pytestmark = [pytest.mark.vllm, pytest.mark.full_form, pytest.mark.timeout(0)]

REQUEST_COUNT_MAX = 6
ANSWER_TOKENS_MAX = 40
# Some schedule must have had each; in the short form those before the last ones. Loads of several
# groups are seldom aborted.
EVENTS = ("loads", "put off", "preemptions", "resets", "failed loads", "aborted loads")


def v2(in_flight_max: int) -> Callable[..., SchedulerRig]:
    def make(model: Path, **options: Any) -> SchedulerRig:
        return RunnerV2Rig(model, in_flight_max=in_flight_max, random=random.Random(7), **options)

    return make


def grouped(*make_groups: Callable[[], Any]) -> Callable[..., SchedulerRig]:
    """Each group takes device blocks of its own."""

    def make(model: Path, *, device_block_count: int, **options: Any) -> SchedulerRig:
        groups = [make_group() for make_group in make_groups]
        return GroupedRig(
            model, device_block_count=device_block_count + 20, groups=groups, **options
        )

    return make


WAYS = [
    pytest.param(SchedulerRig, id="sync-scheduling"),
    # Beside a connector that comes first and loads within a step, or between steps.
    pytest.param(OtherRig, id="beside-sync-and-async-loads"),
    pytest.param(v2(1), id="runner-v2", marks=needs_transfer_results),
    pytest.param(v2(2), id="async-scheduling", marks=needs_transfer_results),
    pytest.param(grouped(partial(window, 40), full), id="two-groups"),
    pytest.param(grouped(full, partial(window, 33), partial(window, 100)), id="three-groups"),
]


class Schedules(RuleBasedStateMachine):
    """Few device blocks, few slots, prompts that share prefixes."""

    def __init__(self, make_rig: Callable[..., SchedulerRig], model: Path, seen: Counter[str]):
        super().__init__()
        self.make_rig, self.model, self.seen = make_rig, model, seen
        self.taken: list[Any] = []  # Device blocks that somebody else has.
        self.added = self.resets = 0

    @initialize(
        device_block_count=st.sampled_from((10, 14, 24)),
        slot_count=st.sampled_from((12, 40, 200)),
        policy=st.sampled_from(("recompute", "recompute", "fail")),
        step_tokens=st.sampled_from((64, 24, 256)),
        warm_count=st.integers(0, 3).map(lambda count: 3 - count),
    )
    def begin(
        self,
        device_block_count: int,
        slot_count: int,
        policy: str,
        step_tokens: int,
        warm_count: int,
    ) -> None:
        self.rig = self.make_rig(
            self.model,
            device_block_count=device_block_count,
            slot_count=slot_count,
            transfer=transfer_config(policy=policy),
            scheduling={"max_num_batched_tokens": step_tokens},
            settings=with_settings(stock_blocks=8, failed_seconds=0.01, offload_slice_blocks=2),
        )
        self.books = Books(self.rig)
        self.seen["several groups"] += isinstance(self.rig, GroupedRig)
        for seed in range(warm_count):  # So that there is something to load.
            self.rig.add(f"warm{seed}", prompt_of(64, seed=seed, shared=50), tokens=1)
        self.rig.run(limit=5000)
        assert self.rig.scheduler.reset_prefix_cache()

    # ------------------------------------------------------------------------------- requests

    @property
    def live(self) -> list[str]:
        return [r.request_id for r in self.rig.scheduler.requests.values() if not r.is_finished()]

    @precondition(lambda self: len(self.rig.scheduler.requests) < REQUEST_COUNT_MAX)
    @rule(
        length=st.sampled_from((64, 100, 49, 33, 16, 15, 1)),
        seed=st.integers(0, 2),
        shared=st.sampled_from((50, 0, 96)),
        tokens=st.sampled_from((20, 1, ANSWER_TOKENS_MAX)),
        steps=st.sampled_from((4, 0, 1, 2, 3)),
    )
    def arrive(self, length: int, seed: int, shared: int, tokens: int, steps: int) -> None:
        """And so many steps on, in which nothing is copied yet."""
        self.added += 1
        room = BLOCK_TOKENS * (self.rig.device_block_count - 1) - ANSWER_TOKENS_MAX
        prompt = prompt_of(min(length, room), seed=seed, shared=shared)
        self.rig.add(f"r{self.added}", prompt, tokens=tokens)
        self.step(steps, answers=True, copies=False, early=False)

    @precondition(lambda self: len(self.rig.scheduler.requests) < REQUEST_COUNT_MAX)
    @rule(seed=st.integers(0, 2), length=st.sampled_from((64, 100)))
    def come_back(self, seed: int, length: int) -> None:
        """What may be loaded is, as far as its copy."""
        if not self.live:
            self.rig.scheduler.reset_prefix_cache()
        self.arrive(length, seed, shared=50, tokens=20, steps=4)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Of one that is being loaded, if there is any."""
        loading = [request_id for request_id in self.live if self.books.owed[request_id]]
        self.rig.abort(data.draw(st.sampled_from(loading or self.live)))

    # ------------------------------------------------------------------------------- steps

    @rule(count=st.integers(1, 4), answers=st.booleans(), copies=st.booleans(), early=st.booleans())
    def step(self, count: int, answers: bool, copies: bool, early: bool) -> None:
        for _ in range(count):
            self.rig.step(answers=answers, copies=copies, early=early)

    @rule(is_forgotten=st.booleans())
    def go_on(self, is_forgotten: bool) -> None:
        """As on a good day; what vLLM has itself afterwards it need not load."""
        for _ in range(40):
            if self.rig.scheduler.has_requests():
                self.rig.step()
        if is_forgotten:
            self.rig.scheduler.reset_prefix_cache()

    @rule(count=st.integers(1, 3))
    def copy(self, count: int) -> None:
        self.rig.lane.step(count)

    # ------------------------------------------------------------------------------- troubles

    @precondition(lambda self: not self.taken)
    @rule(left=st.integers(0, 3), steps=st.integers(0, 20).map(lambda count: 20 - count))
    def squeeze(self, left: int, steps: int) -> None:
        """Device blocks become few: what runs is preempted as soon as it needs one."""
        pool = self.rig.scheduler.kv_cache_manager.block_pool
        self.taken = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - left))
        self.step(steps, answers=True, copies=True, early=False)

    @precondition(lambda self: self.taken)
    @rule()
    def relax(self) -> None:
        pool = self.rig.scheduler.kv_cache_manager.block_pool
        taken, self.taken = self.taken, []
        pool.free_blocks(taken)

    @rule()
    def fail_a_copy(self) -> None:
        """A load's, if one is due."""
        self.rig.copier.failures += 1
        self.rig.lane.step(1)

    @rule(steps=st.integers(0, 2), restarted=st.booleans())
    def lose_the_daemon(self, steps: int, restarted: bool) -> None:
        self.rig.client.disconnect()
        for _ in range(steps):
            self.rig.step()
        self.rig.lane.step()  # Or the worker would not say that it is quiet.
        self.rig.client.reconnect(restarted=restarted)
        self.rig.client.quiet()

    @rule(restarted=st.booleans())
    def lose_the_daemon_at_the_next_load(self, restarted: bool) -> None:
        """After vLLM was promised the load, and before it was planned."""
        self.books.before_load = lambda: self.lose_the_daemon(0, restarted)

    @rule(data=st.data(), is_demoted=st.booleans())
    def evict(self, data: st.DataObject, is_demoted: bool) -> None:
        leave = self.rig.client.demote if is_demoted else self.rig.client.evict
        for namespace in self.rig.client.namespaces.values():
            if namespace.resident:
                leave(namespace, data.draw(st.sampled_from(sorted(namespace.resident))))

    @rule(seconds=st.sampled_from((0.02, 0.2, 3.0, 40.0)))
    def wait(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)
        self.rig.client.expire()

    @rule(is_forced=st.booleans(), has_new_weights=st.booleans())
    def reset(self, is_forced: bool, has_new_weights: bool) -> None:
        """vLLM refuses to force it while loads hold blocks; unforced it may do half of it."""
        if isinstance(self.rig, RunnerV2Rig):
            while self.rig.in_flight:
                self.rig.handle_output()
        if self.taken:
            self.relax()
        weights = self.rig.weights
        if has_new_weights and is_forced:
            self.resets += 1
            self.rig.weights = f"v1 and {self.resets}"
        try:
            done = self.rig.scheduler.reset_prefix_cache(
                reset_running_requests=is_forced, reset_connector=has_new_weights
            )
            assert done or not is_forced
            self.books.counts["resets"] += done and has_new_weights
        except RuntimeError:
            self.rig.weights = weights

    # ------------------------------------------------------------------------------- the end

    def teardown(self) -> None:
        if not hasattr(self, "books"):
            return
        if self.taken:
            self.relax()
        self.rig.copier.failures, self.books.before_load = 0, None
        self.step(2, answers=True, copies=True, early=False)  # Whatever was lost is noticed.
        self.rig.run(limit=5000)
        self.rig.client.quiet()
        self.rig.check_nothing_left()
        self.books.close()
        self.seen.update(self.books.counts)
        self.seen["schedules"] += 1


@pytest.mark.parametrize("make_rig", WAYS)
def test_whatever_happens_every_request_ends_once_and_nothing_is_left(
    tiny_llama: Path, make_rig: Callable[..., SchedulerRig]
) -> None:
    seen: Counter[str] = Counter()
    run_state_machine_as_test(
        lambda: Schedules(make_rig, tiny_llama, seen),
        settings=settings(
            max_examples=rounds(short=10, full=300),
            stateful_step_count=30,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    state_finding(f"schedules: {dict(seen)}")
    for event in EVENTS[: 3 if not is_torture() else 5 if seen["several groups"] else 6]:
        assert seen[event] > 0, f"no schedule had {event}"
