"""A bug of ours: the engine goes on without kvtier, and what it waits for is told it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from kvtier.connector.copy_lane import Copy, ThreadLane
from kvtier.connector.copying import CopyProgress
from kvtier.connector.jobs import FailReason, JobResult, OffloadJob, StepOutcome, StepPlan
from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.sharding import Place
from tests.support.connector_rig import Rig, begin, committed, numbered_chain
from tests.support.fake_client import FakeSession

CHAIN = numbered_chain(4)
SETTINGS = ConnectorSettings(stock_blocks=16, holds_preempted_blocks=True)

HOOKS: dict[str, Callable[[Rig], object]] = {
    "on_new_request": lambda rig: rig.scheduler.on_new_request("n", CHAIN),
    "get_onboard_count": lambda rig: rig.scheduler.get_onboard_count("a", 0),
    "on_allocated": lambda rig: rig.scheduler.on_allocated("a", [1], 0),
    "on_blocks_full": lambda rig: rig.scheduler.on_blocks_full("a", CHAIN, [0, 1, 2, 3]),
    "build_plan": lambda rig: rig.scheduler.build_plan(),
    "on_results": lambda rig: rig.scheduler.on_results([]),
    "request_finished": lambda rig: rig.scheduler.request_finished("unknown"),
    "on_preempted": lambda rig: rig.scheduler.on_preempted("unknown"),
    "on_device_blocks_short": lambda rig: rig.scheduler.on_device_blocks_short(1),
    "on_blocks_invalid": lambda rig: rig.scheduler.on_blocks_invalid([1]),
    "reset": lambda rig: rig.scheduler.reset(rig.spec),
    "clear": lambda rig: rig.scheduler.clear(rig.spec),
    "hint": lambda rig: rig.scheduler.hint(CHAIN),
    "close": lambda rig: rig.scheduler.close(),
}
ANSWERS = {"get_onboard_count": 0, "request_finished": False, "on_preempted": False}


def quiet_rig() -> Rig:
    return Rig(settings=SETTINGS, raises=False)


def plant_bug(rig: Rig) -> None:
    """The next hook of the scheduler side fails."""

    def fail() -> None:
        raise AssertionError("a planted bug")

    rig.control.post(fail)


@pytest.mark.parametrize("hook", HOOKS)
def test_no_hook_raises_and_all_say_no_kvtier_from_then_on(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = quiet_rig()
    begin(rig, "a", CHAIN)
    plant_bug(rig)
    with caplog.at_level(logging.ERROR):
        first = HOOKS[hook](rig)
        plant_bug(rig)  # Never looked at.
        rest = {name: run(rig) for name, run in HOOKS.items()}
    assert first == rest[hook]
    empty = {"build_plan": StepPlan(rig.spec), "on_results": StepOutcome()}
    assert rest == {name: {**ANSWERS, **empty}.get(name) for name in rest}
    assert [bool(record.exc_info) for record in caplog.records] == [True]
    assert rig.scheduler.is_disabled
    assert rig.scheduler.stats().disabled_by.startswith("AssertionError in ")
    assert not rig.scheduler.has_work


def test_with_the_setting_it_is_raised() -> None:
    rig = Rig()
    plant_bug(rig)
    with pytest.raises(AssertionError, match="planted"):
        rig.scheduler.build_plan()


def test_recalls_pile_up_nowhere_after_it() -> None:
    rig = quiet_rig()
    plant_bug(rig)
    rig.plan()
    rig.client.recall(rig.namespace, 4)
    assert rig.control.is_closed
    rig.plan()
    assert rig.scheduler.stock_count == 16  # Till the session ends: they are in doubt.


def test_onboard_not_handed_out_fails_at_the_next_results() -> None:
    rig = quiet_rig()
    rig.offload("first", CHAIN)
    rig.onboard("a", CHAIN, first=20)
    plant_bug(rig)
    assert rig.plan().onboards == ()
    had_work = rig.scheduler.has_work
    assert rig.results() == StepOutcome(failed=("a",))
    assert rig.results() == StepOutcome()
    assert (had_work, rig.scheduler.has_work) == (True, False)
    assert rig.scheduler.request_finished("a") is False


def test_engine_that_tells_results_only_when_there_are_some_gets_on_after_it() -> None:
    """vLLM tells of what its workers report, and an idle one steps as long as there is work."""
    rig = quiet_rig()
    rig.offload("first", CHAIN)
    rig.scheduler.on_new_request("a", CHAIN)
    rig.scheduler.on_blocks_full("a", CHAIN, [0, 1, 2, 3])
    assert rig.scheduler.request_finished("a") is True  # Till its match is answered.
    assert not rig.scheduler.has_outcome
    plant_bug(rig)
    rig.plan()
    assert (rig.scheduler.has_work, rig.scheduler.has_outcome) == (True, True)
    assert rig.scheduler.on_results(()) == StepOutcome(released=("a",))
    assert (rig.scheduler.has_work, rig.scheduler.has_outcome) == (False, False)


def test_onboard_allocated_after_it_fails() -> None:
    rig = quiet_rig()
    rig.offload("first", CHAIN)
    rig.scheduler.on_new_request("a", CHAIN)
    assert rig.scheduler.get_onboard_count("a", 0) is None
    rig.answer()
    assert rig.scheduler.get_onboard_count("a", 0) == 4
    plant_bug(rig)
    rig.scheduler.on_allocated("a", [20, 21, 22, 23], 4)
    assert rig.results() == StepOutcome(failed=("a",))


def test_onboard_being_written_fails_only_when_every_worker_has_ended() -> None:
    """Told earlier, the engine would compute into blocks that a worker still writes."""
    settings = ConnectorSettings(worker_count=2, stock_blocks=16)
    rig = Rig(worker_count=2, settings=settings, raises=False)
    rig.offload("first", CHAIN)
    rig.onboard("a", CHAIN, first=20)
    assert len(rig.plan().onboards) == 1
    plant_bug(rig)
    assert rig.results() == StepOutcome()
    rig.lanes[0].step()
    assert rig.results() == StepOutcome()
    rig.lanes[1].step()
    assert rig.results() == StepOutcome(failed=("a",))


def test_verdict_lost_in_the_failing_hook_is_a_failure() -> None:
    rig = quiet_rig()
    rig.offload("first", CHAIN)
    rig.onboard("a", CHAIN, first=20)
    rig.plan()
    rig.copy()
    plant_bug(rig)
    assert rig.results() == StepOutcome(failed=("a",))


def test_request_finished_in_mid_onboard_is_released_when_the_copy_ends() -> None:
    rig = quiet_rig()
    rig.offload("first", CHAIN)
    rig.onboard("a", CHAIN, first=20)
    rig.plan()
    plant_bug(rig)
    assert rig.scheduler.request_finished("a") is True
    assert rig.results() == StepOutcome()
    rig.copy()
    assert rig.results() == StepOutcome(released=("a",))
    assert rig.results() == StepOutcome()


def test_held_blocks_are_released_when_their_offload_ends_and_nothing_is_committed() -> None:
    rig = quiet_rig()
    begin(rig, "a", CHAIN)
    rig.plan()
    assert rig.scheduler.request_finished("a") is True
    plant_bug(rig)
    assert rig.results() == StepOutcome()
    rig.copy()
    assert rig.results() == StepOutcome(released=("a",))
    rig.answer()
    assert committed(rig) == []


def test_lingering_request_is_released_at_once() -> None:
    rig = quiet_rig()
    rig.scheduler.on_new_request("a", CHAIN)
    rig.scheduler.on_blocks_full("a", CHAIN, [0, 1, 2, 3])
    assert rig.scheduler.request_finished("a") is True
    plant_bug(rig)
    assert rig.results() == StepOutcome(released=("a",))


@pytest.mark.parametrize("is_held", [False, True])
def test_preempted_while_read_is_kept_only_by_an_engine_that_keeps(is_held: bool) -> None:
    settings = ConnectorSettings(stock_blocks=16, holds_preempted_blocks=is_held)
    rig = Rig(settings=settings, raises=False)
    begin(rig, "a", CHAIN)
    rig.plan()
    plant_bug(rig)
    assert rig.scheduler.on_preempted("a") is is_held
    rig.copy()
    assert rig.results().released == (("a",) if is_held else ())


# ------------------------------------------------------------------------------- the worker side


def test_job_that_cannot_be_queued_is_reported_as_failed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = quiet_rig()
    begin(rig, "a", CHAIN)
    monkeypatch.setattr(rig.lanes[0], "submit", None)  # Calling it raises TypeError.
    with caplog.at_level(logging.ERROR):
        rig.plan()
        (result,) = rig.workers[0].poll()
        assert result.failed is FailReason.INTERNAL
        rig.scheduler.on_results([result])
        for _ in range(10):
            rig.step()
    assert len(caplog.records) == 1
    rig.client.reconnect()
    rig.client.quiet()  # Would wait for ever for a job that still counts as open.


def test_copy_that_ends_unexpectedly_fails_alone() -> None:
    def steps(progress: CopyProgress) -> Iterator[None]:
        if progress.job.job_id == 1:
            raise AssertionError("a planted bug")
        yield

    lane = ThreadLane()
    for job_id in (1, 2):
        progress = CopyProgress(OffloadJob(job_id, "r", FakeSession(1, 1), (0,), (0,)))
        end = partial(CopyProgress.result, place=Place(), shard_bytes=16)
        lane.submit(Copy(progress, steps(progress), end))
    deadline, results = time.monotonic() + 10, list[JobResult]()
    while len(results) < 2 and time.monotonic() < deadline:
        results += lane.poll()
    lane.close()
    assert [result.failed for result in results] == [FailReason.INTERNAL, None]
