"""Resets of vLLM's prefix cache with its connector's: for new weights, perhaps at every step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import Unavailable
from kvtier.namespace import FACT_CHARS_MAX
from tests.support.daemon import RunningDaemon
from tests.vllm.daemon_rig import daemon_rig
from tests.vllm.scheduler_rig import SchedulerRig, prompt_of

pytestmark = pytest.mark.vllm


def reset(rig: SchedulerRig, weights: str) -> None:
    rig.weights = weights
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def test_engine_takes_two_namespaces_however_often_it_is_reset(tiny_llama: Path) -> None:
    rig = SchedulerRig(tiny_llama)
    for number in range(20):
        rig.add(f"r{number}", prompt_of(100), tokens=1)
        rig.run()  # Checks that nothing of other weights is built on.
        reset(rig, f"w{number}")
        rig.run()
    assert rig.core.stats().onboarded_blocks == 0
    assert rig.core.stats().committed_blocks == 20 * 6
    assert len(rig.client.namespaces) == 2
    rig.check_nothing_left()


def test_what_was_stored_before_a_reset_is_not_asked_for_while_the_daemon_is_slow(
    tiny_llama: Path,
) -> None:
    rig = SchedulerRig(tiny_llama)
    reset(rig, "w1")
    rig.add("old", prompt_of(100), tokens=1)
    rig.run()
    assert rig.core.stats().committed_blocks == 6
    reset(rig, "w2")
    rig.add("new", prompt_of(100), tokens=1)
    while rig.scheduler.requests:
        rig.step(answers=False)
    assert rig.core.stats().onboarded_blocks == 0
    rig.add("next", prompt_of(100, seed=1), tokens=1)
    rig.run()
    assert rig.client.calls["clear"] == 1
    assert len(rig.client.namespaces) == 2
    rig.check_nothing_left()


def test_reset_that_the_daemon_does_not_hear_of_takes_another_namespace(tiny_llama: Path) -> None:
    rig = SchedulerRig(tiny_llama)
    reset(rig, "w1")
    rig.add("old", prompt_of(100), tokens=1)
    rig.run()
    rig.client.fail_next("clear", Unavailable("slow"))
    reset(rig, "w2")
    rig.step()
    for name in ("new", "again"):
        assert rig.scheduler.reset_prefix_cache()
        rig.add(name, prompt_of(100), tokens=1)
        rig.run()
    assert len(rig.client.namespaces) == 3
    assert rig.core.stats().onboarded_blocks == 6
    rig.check_nothing_left()


def test_long_version_of_the_weights_outlives_a_reset(tiny_llama: Path) -> None:
    rig = SchedulerRig(tiny_llama)
    rig.side._spec = replace(rig.spec, weights="w" * FACT_CHARS_MAX)
    reset(rig, "w1")
    rig.core.spec.validate()
    assert not rig.core.is_disabled


def test_engine_of_a_real_daemon_is_served_after_more_resets_than_there_are_namespaces(
    tiny_llama: Path, daemon: RunningDaemon
) -> None:
    with daemon_rig(tiny_llama, daemon.socket) as rig:
        for _ in range(300):
            assert rig.scheduler.reset_prefix_cache(reset_connector=True)
        rig.wait(lambda: (rig.core.on_results(()), rig.core._desk.session() is not None)[1])
        for name, seed in (("a", 1), ("b", 1)):
            rig.forget_own_cache()
            rig.add(name, prompt_of(100, seed=seed), tokens=1)
            rig.settle()
            rig.step_until(lambda: rig.core.stats().committed_blocks == 6)
        assert rig.core.stats().onboarded_blocks == 6
        assert not rig.core.is_disabled
