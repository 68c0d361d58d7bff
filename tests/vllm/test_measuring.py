"""What the metrics of vLLM's users are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.connector.jobs import StepPlan
from kvtier.connector.stats import ConnectorStats
from kvtier.connector.vllm.measuring import Meter
from tests.support.clock import ManualClock
from tests.support.connector_rig import spec_of
from tests.vllm.scheduler_rig import SchedulerRig, prompt_of

pytestmark = pytest.mark.vllm


def test_deadline_of_a_request_told_before_is_not_the_next_ones_reason() -> None:
    """A preempted request asks again, and is counted as missed once."""
    meter, stats = Meter(ManualClock()), ConnectorStats()
    stats.deadline_missed_requests += 1
    meter.note_miss(stats, is_connected=True)
    meter.take(stats)
    stats.deadline_missed_requests += 1  # The same request's, again.
    meter.take(stats)
    meter.note_miss(stats, is_connected=True)
    told = meter.take(stats)
    assert told is not None
    assert told.data == {"missed_requests absent": 1}


@pytest.mark.parametrize("is_async", [False, True])
def test_saved_time_counts_at_the_prefills_rate_however_early_vllm_schedules(
    is_async: bool,
) -> None:
    """With asynchronous scheduling the next step is planned before this one's output is there."""
    clock, plan = ManualClock(), StepPlan(spec_of())
    meter = Meter(clock)
    meter.note_step(plan, 1000)
    clock.advance(0.1)
    if is_async:
        meter.note_step(plan, 1)
    clock.advance(0.9)
    meter.note_output(())  # A millisecond a token.
    clock.advance(0.01)
    if not is_async:
        meter.note_step(plan, 1)
    meter.note_output(())
    meter.note_allocated("a", 500)
    clock.advance(0.1)
    meter.note_received("a", is_good=True)
    told = meter.take(ConnectorStats())
    assert told is not None
    assert told.data["saved_seconds"] == pytest.approx(0.5 - 0.1)


def test_request_that_was_preempted_after_its_hit_did_not_get_nothing(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = SchedulerRig(tiny_llama)
    rig.add("stored", prompt_of(100), tokens=1)
    rig.run()
    rig.restart()
    missed: list[Any] = []
    monkeypatch.setattr(rig.side._meter, "note_miss", lambda *_, **__: missed.append(1))
    rig.add("again", prompt_of(100), tokens=20)
    while rig.core.stats().onboarded_blocks < 6 or not rig.scheduler.running:
        rig.step()
    rig.client.void(rig.core._desk.namespace)
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.run()
    assert missed == []
    rig.check_nothing_left()
