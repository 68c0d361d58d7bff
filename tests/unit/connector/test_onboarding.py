"""Onboard: what is promised, when the wait ends, and that every lease ends once."""

from __future__ import annotations

import pytest

from kvtier.connector.jobs import FailReason, JobResult, StepOutcome
from kvtier.connector.settings import ConnectorSettings
from kvtier.errors import ConfigError, Unavailable
from tests.support.connector_rig import Rig, content_of, numbered_chain, spec_of


def stocked(count: int = 4, **kwargs: object) -> tuple[Rig, list[bytes]]:
    """A rig whose daemon has the first `count` blocks of the chain returned."""
    rig = Rig(**kwargs)  # type: ignore[arg-type]
    chain = numbered_chain(count)
    rig.offload("first", chain)
    rig.check_nothing_held()
    return rig, chain


def test_match_is_asked_before_anybody_schedules() -> None:
    rig = Rig()
    rig.scheduler.on_new_request("a", numbered_chain(2))
    rig.answer()
    assert rig.client.calls["match"] == 1
    assert rig.client.calls["acquire"] == 0


def test_the_daemon_is_told_which_request_asks() -> None:
    """Or nobody could find a slow request of the engine's log in the daemon's."""
    rig, chain = stocked(2)
    rig.client.requests_asked.clear()
    rig.onboard("engine-7", chain, first=20)
    assert {call for call, _ in rig.client.requests_asked} == {"match", "acquire"}
    assert {request for _, request in rig.client.requests_asked} == {"engine-7"}


def test_waiting_requests_that_nobody_schedules_pin_nothing() -> None:
    rig, chain = stocked()
    for index in range(100):
        rig.scheduler.on_new_request(f"r{index}", chain)
    rig.answer()
    assert not rig.client.leases


def test_onboarded_bytes_are_the_offloaded_ones() -> None:
    rig, chain = stocked(4)
    assert rig.onboard("b", chain, first=20) == 4
    assert rig.step() == StepOutcome(onboarded=("b",))
    for index, block_hash in enumerate(chain):
        assert (rig.copiers[0].blocks[20 + index] == content_of(block_hash)).all()
    assert rig.scheduler.request_finished("b") is False
    rig.answer()
    rig.check_nothing_held()


def test_blocks_the_engine_has_itself_are_skipped() -> None:
    rig, chain = stocked(4)
    rig.scheduler.on_new_request("b", chain)
    assert rig.scheduler.get_onboard_count("b", 3) is None
    rig.answer()
    assert rig.scheduler.get_onboard_count("b", 3) == 1
    rig.scheduler.on_allocated("b", [30], 1)
    assert rig.step().onboarded == ("b",)
    assert (rig.copiers[0].blocks[30] == content_of(chain[3])).all()


def test_promise_follows_a_local_prefix_that_grew() -> None:
    rig, chain = stocked(4)
    rig.scheduler.on_new_request("b", chain)
    rig.scheduler.get_onboard_count("b", 1)
    rig.answer()
    assert rig.scheduler.get_onboard_count("b", 1) == 3
    assert rig.scheduler.get_onboard_count("b", 2) == 2
    rig.scheduler.on_allocated("b", [30, 31], 2)
    assert rig.step().onboarded == ("b",)
    assert (rig.copiers[0].blocks[30] == content_of(chain[2])).all()


def test_local_prefix_that_shrank_needs_a_new_lease() -> None:
    rig, chain = stocked(4)
    rig.scheduler.on_new_request("b", chain)
    rig.scheduler.get_onboard_count("b", 2)
    rig.answer()
    assert rig.scheduler.get_onboard_count("b", 2) == 2
    assert rig.scheduler.get_onboard_count("b", 0) is None
    rig.answer()
    assert rig.scheduler.get_onboard_count("b", 0) == 4
    assert len(rig.client.leases) == 1
    rig.check()


def test_miss_answers_zero_without_an_acquire() -> None:
    rig = Rig()
    rig.scheduler.on_new_request("a", numbered_chain(3))
    rig.answer()
    assert rig.scheduler.get_onboard_count("a", 0) == 0
    rig.answer()
    assert rig.client.calls["acquire"] == 0


def test_old_miss_is_not_believed_for_ever() -> None:
    rig = Rig()
    chain = numbered_chain(3)
    rig.scheduler.on_new_request("waits", chain)
    rig.answer()
    rig.offload("other", chain)
    rig.clock.advance(rig.settings.match_fresh_seconds + 0.1)
    assert rig.scheduler.get_onboard_count("waits", 0) is None
    rig.answer()
    assert rig.scheduler.get_onboard_count("waits", 0) == 3


def test_no_answer_by_the_deadline_is_a_miss_and_the_late_lease_ends() -> None:
    rig, chain = stocked()
    rig.scheduler.on_new_request("b", chain)
    assert rig.scheduler.get_onboard_count("b", 0) is None
    rig.clock.advance(rig.settings.onboard_wait_seconds - 0.001)
    assert rig.scheduler.get_onboard_count("b", 0) is None
    rig.clock.advance(0.002)
    assert rig.scheduler.get_onboard_count("b", 0) == 0
    assert rig.scheduler.get_onboard_count("b", 0) == 0
    rig.answer()  # The acquire is made only now ...
    rig.scheduler.build_plan()
    rig.answer()  # ... or had been, and is released here.
    assert not rig.client.leases
    assert rig.scheduler.stats().deadline_missed_requests == 1
    rig.check()


def test_lease_that_arrives_after_its_request_was_aborted_is_released() -> None:
    rig, chain = stocked()
    rig.scheduler.on_new_request("b", chain)
    rig.scheduler.get_onboard_count("b", 0)
    rig.client.during["acquire"] = lambda: rig.scheduler.request_finished("b")
    rig.answer()  # No hook comes after it: an engine that does nothing must not pin the lease.
    assert not rig.client.leases
    assert rig.client.calls["release"] == 1
    rig.scheduler.on_results([])
    assert rig.scheduler.lease_count == 0
    rig.check()


def test_acquires_in_flight_are_bounded() -> None:
    settings = ConnectorSettings(acquires_in_flight_max=2, stock_blocks=8)
    rig, chain = stocked(settings=settings)
    for name in "bcd":
        rig.scheduler.on_new_request(name, chain)
        assert rig.scheduler.get_onboard_count(name, 0) is None
    rig.answer()
    assert len(rig.client.leases) == 2
    assert rig.scheduler.get_onboard_count("b", 0) == 4
    assert rig.scheduler.get_onboard_count("d", 0) is None
    rig.scheduler.request_finished("b")
    rig.answer()
    assert rig.scheduler.get_onboard_count("d", 0) is None
    rig.answer()
    assert rig.scheduler.get_onboard_count("d", 0) == 4
    assert len(rig.client.leases) == 2


def test_too_few_blocks_are_not_worth_an_onboard() -> None:
    settings = ConnectorSettings(onboard_blocks_min=3, stock_blocks=8)
    rig, chain = stocked(2, settings=settings)
    longer = chain + numbered_chain(3, "tail")
    rig.scheduler.on_new_request("b", longer)
    rig.scheduler.get_onboard_count("b", 0)
    rig.answer()
    assert rig.scheduler.get_onboard_count("b", 0) == 0
    rig.answer()
    assert not rig.client.leases


def test_lease_near_its_end_is_exchanged_before_it_is_promised() -> None:
    rig, chain = stocked()
    rig.scheduler.on_new_request("b", chain)
    rig.scheduler.get_onboard_count("b", 0)
    rig.answer()
    assert rig.scheduler.get_onboard_count("b", 0) == 4
    rig.clock.advance(rig.settings.lease_seconds)
    assert rig.scheduler.get_onboard_count("b", 0) is None
    rig.answer()
    assert rig.scheduler.get_onboard_count("b", 0) == 4
    assert len(rig.client.leases) == 1
    rig.check()


def test_load_not_started_by_the_deadline_fails_without_a_copy() -> None:
    rig, chain = stocked()
    rig.onboard("b", chain, first=20)
    rig.plan()
    rig.clock.advance(rig.settings.lease_seconds + 1)
    rig.copy()
    assert rig.results() == StepOutcome(failed=("b",))
    assert not rig.copiers[0].blocks[20:24].any()
    rig.answer()
    assert not rig.client.leases


def test_lease_ends_only_after_every_worker_reported() -> None:
    rig, chain = stocked(worker_count=2)
    rig.onboard("b", chain, first=20)
    rig.plan()
    rig.lanes[0].step()
    assert rig.results() == StepOutcome()
    rig.answer()
    assert len(rig.client.leases) == 1
    rig.lanes[1].step()
    assert rig.results() == StepOutcome(onboarded=("b",))
    rig.answer()
    assert not rig.client.leases


def test_one_failing_worker_fails_the_request() -> None:
    rig, chain = stocked(worker_count=2)
    rig.onboard("b", chain, first=20)
    rig.copiers[1].failures = 1
    assert rig.step() == StepOutcome(failed=("b",))


def test_failed_load_is_not_offered_again_until_its_time_has_passed() -> None:
    rig, chain = stocked(4)
    rig.onboard("b", chain, first=20)
    rig.copiers[0].failures = 1
    assert rig.step().failed == ("b",)
    assert rig.scheduler.get_onboard_count("b", 0) == 0  # Else a livelock.
    rig.scheduler.on_new_request("c", chain)
    rig.scheduler.get_onboard_count("c", 0)
    rig.answer()
    assert rig.scheduler.get_onboard_count("c", 0) == 0
    rig.clock.advance(rig.settings.failed_seconds)
    assert rig.onboard("d", chain, first=30) == 4
    rig.check()


def test_blocks_before_the_failed_one_are_still_offered() -> None:
    rig, chain = stocked(4)
    rig.onboard("b", chain, first=20)
    job = rig.plan().onboards[0]
    result = JobResult(job.job_id, 0, FailReason.COPY, failed_index=2)
    assert rig.scheduler.on_results([result]).failed == ("b",)
    assert rig.onboard("c", chain, first=30) == 2
    assert rig.client.hashes_asked[-1] == 2


def test_abort_while_loading_keeps_the_device_blocks_until_the_report() -> None:
    rig, chain = stocked()
    rig.onboard("b", chain, first=20)
    rig.plan()
    assert rig.scheduler.request_finished("b") is True
    rig.answer()
    assert len(rig.client.leases) == 1
    rig.copy()
    assert rig.results() == StepOutcome(released=("b",))
    assert rig.results() == StepOutcome()
    rig.answer()
    rig.check_nothing_held()
    assert rig.scheduler.request_count == 0


def test_abort_before_the_plan_leaves_nothing_to_wait_for() -> None:
    rig, chain = stocked()
    rig.onboard("b", chain, first=20)
    assert rig.scheduler.request_finished("b") is False
    assert rig.plan().onboards == ()
    rig.answer()
    rig.check_nothing_held()


def test_late_and_repeated_and_unknown_reports_change_nothing() -> None:
    rig, chain = stocked()
    rig.onboard("b", chain, first=20)
    job = rig.plan().onboards[0]
    done = JobResult(job.job_id, 0, None)
    assert rig.scheduler.on_results([done, done]).onboarded == ("b",)
    assert rig.scheduler.on_results([done, JobResult(999, 0, None)]) == StepOutcome()
    rig.answer()
    rig.check()


def test_engine_that_runs_without_what_was_promised_gives_the_lease_back() -> None:
    rig, chain = stocked()
    rig.scheduler.on_new_request("b", chain)
    rig.scheduler.get_onboard_count("b", 0)
    rig.answer()
    assert rig.scheduler.get_onboard_count("b", 0) == 4
    rig.scheduler.on_blocks_full("b", chain[:1], [9])
    rig.answer()
    assert not rig.client.leases


def test_declined_promise_gives_the_lease_back() -> None:
    rig, chain = stocked()
    rig.scheduler.on_new_request("b", chain)
    rig.scheduler.get_onboard_count("b", 0)
    rig.answer()
    assert rig.scheduler.get_onboard_count("b", 0) == 4
    rig.scheduler.on_allocated("b", [], 0)
    rig.answer()
    assert not rig.client.leases


def test_smaller_allocation_onboards_the_head() -> None:
    rig, chain = stocked(4)
    rig.scheduler.on_new_request("b", chain)
    rig.scheduler.get_onboard_count("b", 0)
    rig.answer()
    assert rig.scheduler.get_onboard_count("b", 0) == 4
    rig.scheduler.on_allocated("b", [20, 21], 2)
    assert rig.step().onboarded == ("b",)
    assert (rig.copiers[0].blocks[21] == content_of(chain[1])).all()


def test_absent_daemon_is_a_miss_at_once() -> None:
    rig, chain = stocked()
    rig.client.disconnect()
    rig.scheduler.on_new_request("b", chain)
    assert rig.scheduler.get_onboard_count("b", 0) == 0


def test_failing_acquire_is_a_miss() -> None:
    rig, chain = stocked()
    rig.scheduler.on_new_request("b", chain)
    rig.client.fail_next("acquire", Unavailable("slow"))
    rig.scheduler.get_onboard_count("b", 0)
    rig.answer()
    assert rig.scheduler.get_onboard_count("b", 0) == 0
    assert rig.scheduler.stats().call_errors["Unavailable"] == 1


def test_session_lost_after_the_promise_fails_the_request_without_a_copy() -> None:
    rig, chain = stocked()
    rig.onboard("b", chain, first=20)
    rig.client.reconnect()
    assert rig.plan().onboards == ()
    assert rig.results() == StepOutcome(failed=("b",))
    assert not rig.copiers[0].blocks[20:24].any()


def test_session_lost_after_the_plan_fails_in_the_worker() -> None:
    rig, chain = stocked()
    rig.onboard("b", chain, first=20)
    rig.plan()
    rig.client.reconnect()
    rig.copy()
    assert rig.results() == StepOutcome(failed=("b",))
    assert rig.onboard("c", chain, first=30) == 4  # Nothing is held against the blocks.


def test_failed_request_that_is_aborted_first_is_not_reported() -> None:
    rig, chain = stocked()
    rig.onboard("b", chain, first=20)
    rig.client.reconnect()
    rig.plan()
    assert rig.scheduler.request_finished("b") is False
    assert rig.results() == StepOutcome()


def test_reset_fails_loads_under_way_and_asks_the_new_namespace() -> None:
    rig, chain = stocked()
    rig.onboard("b", chain, first=20)
    rig.plan()
    rig.scheduler.on_new_request("c", chain)
    rig.scheduler.get_onboard_count("c", 0)
    rig.answer()
    rig.scheduler.reset(spec_of("v2"))
    rig.copy()
    assert rig.results() == StepOutcome(failed=("b",))
    rig.scheduler.get_onboard_count("c", 0)
    rig.answer()
    assert rig.scheduler.get_onboard_count("c", 0) == 0
    rig.answer()
    assert not rig.client.leases
    rig.check()


def test_preempted_request_may_onboard_what_it_had_computed_itself() -> None:
    rig, chain = stocked(4)
    rig.scheduler.on_new_request("b", chain[:1])
    rig.answer()
    rig.compute(chain, [5, 6, 7, 8])
    rig.scheduler.on_blocks_full("b", chain, [5, 6, 7, 8])
    assert rig.scheduler.on_preempted("b") is False
    rig.scheduler.get_onboard_count("b", 0)
    rig.answer()
    assert rig.scheduler.get_onboard_count("b", 0) == 4


def test_unknown_requests_are_ignored() -> None:
    rig = Rig()
    assert rig.scheduler.get_onboard_count("ghost", 0) == 0
    rig.scheduler.on_allocated("ghost", [1], 1)
    rig.scheduler.on_blocks_full("ghost", numbered_chain(1), [1])
    assert rig.scheduler.on_preempted("ghost") is False
    assert rig.scheduler.request_finished("ghost") is False
    assert rig.step() == StepOutcome()


@pytest.mark.parametrize(
    "wrong",
    [
        {"acquires_in_flight_max": 0},
        {"onboard_wait_seconds": -1.0},
        {"waiting_acquires_max": 0},
        {"nvme_bytes_per_second": 0.0},
        {"nvme_wait_seconds_max": -1.0},
        {"lease_seconds": 1.0, "lease_slack_seconds": 1.0},
    ],
)
def test_wrong_settings_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ConnectorSettings(**wrong)  # type: ignore[arg-type]
