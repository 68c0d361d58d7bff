"""Requests that finish before their blocks could be planned."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.connector.jobs import StepOutcome
from kvtier.connector.settings import ConnectorSettings
from kvtier.errors import Unavailable
from tests.support.connector_rig import Rig, begin, committed, numbered_chain, spec_of

RELEASED = StepOutcome(released=("a",))
CHAIN = numbered_chain(5)


def short_request(rig: Rig, name: str = "a", chain: list[bytes] = CHAIN, first: int = 0) -> bool:
    """It comes, is computed, and is over before anything is answered."""
    blocks = list(range(first, first + len(chain)))
    rig.scheduler.on_new_request(name, chain)
    rig.compute(chain, blocks)
    rig.scheduler.on_blocks_full(name, chain, blocks)
    return rig.scheduler.request_finished(name)


def dropped(rig: Rig) -> dict[str, int]:
    return dict(rig.scheduler.stats().dropped_blocks)


def test_finished_before_the_match_answers_is_offloaded() -> None:
    rig = Rig()
    assert short_request(rig) is True
    assert rig.scheduler.has_work
    assert rig.step() == StepOutcome()
    assert rig.step() == RELEASED
    assert committed(rig) == CHAIN
    assert rig.step() == StepOutcome()
    assert dropped(rig) == {}
    rig.check_nothing_held()


def test_all_resident_by_the_matchs_answer_is_released_without_a_copy() -> None:
    rig = Rig()
    rig.offload("first", CHAIN)
    rig.copiers[0].copied_out.clear()
    assert short_request(rig) is True
    assert [rig.step(), rig.step(), rig.step()] == [StepOutcome(), RELEASED, StepOutcome()]
    assert rig.copiers[0].copied_out == []
    rig.check_nothing_held()


def test_slots_short_at_the_finish_are_used_when_they_come() -> None:
    rig = Rig(settings=ConnectorSettings(stock_blocks=2))
    begin(rig, "a", CHAIN)
    assert rig.scheduler.request_finished("a") is True
    outcomes = [rig.step() for _ in range(8)]
    assert [outcome for outcome in outcomes if outcome != StepOutcome()] == [RELEASED]
    assert committed(rig) == CHAIN
    rig.check_nothing_held()


def test_more_blocks_than_a_plan_may_add_are_planned_one_plan_after_the_other() -> None:
    rig = Rig(settings=ConnectorSettings(stock_blocks=16, offload_blocks_per_plan=2))
    assert short_request(rig) is True
    outcomes = [rig.step() for _ in range(6)]
    assert [len(plan.offloads[0].slots) for plan in rig.plans if plan.offloads] == [2, 2, 1]
    assert outcomes.count(RELEASED) == 1
    assert committed(rig) == CHAIN


def test_after_the_deadline_the_rest_is_dropped_and_released_once() -> None:
    rig = Rig()
    assert short_request(rig) is True
    rig.plan()
    assert rig.results() == StepOutcome()
    rig.clock.advance(rig.settings.finish_wait_seconds)
    rig.plan()
    assert rig.results() == RELEASED
    assert dropped(rig) == {"finish_deadline": 5}
    outcomes = [rig.step() for _ in range(4)]  # The match answers now, to nobody.
    assert outcomes == [StepOutcome()] * 4
    assert committed(rig) == []
    rig.check_nothing_held()


@pytest.mark.parametrize("results_first", [False, True])
def test_answer_that_came_during_a_step_longer_than_the_wait_still_counts(
    results_first: bool,
) -> None:
    rig = Rig()
    assert short_request(rig) is True
    rig.answer()
    rig.clock.advance(10.0)
    if results_first:
        assert rig.results() == StepOutcome()
    rig.step()
    assert committed(rig) == CHAIN
    assert dropped(rig) == {}


def test_deadline_while_a_flight_reads_is_released_when_the_flight_ends() -> None:
    rig = Rig(slot_count=2, settings=ConnectorSettings(stock_blocks=2))
    begin(rig, "a", CHAIN)
    rig.plan()
    assert rig.scheduler.request_finished("a") is True
    rig.clock.advance(1.0)
    rig.plan()
    assert rig.results() == StepOutcome()
    assert dropped(rig) == {"finish_deadline": 3}
    rig.copy()
    assert rig.results() == RELEASED
    rig.answer()
    assert committed(rig) == CHAIN[:2]


def lose(rig: Rig) -> None:
    rig.client.disconnect()


def renew(rig: Rig) -> None:
    rig.client.reconnect(restarted=True)


def reset(rig: Rig) -> None:
    rig.scheduler.reset(spec_of("v2"))


@pytest.mark.parametrize(
    ("event", "reason"), [(lose, "session_lost"), (renew, "session_lost"), (reset, "reset")]
)
def test_losing_the_ground_releases_at_once(event: Callable[[Rig], None], reason: str) -> None:
    rig = Rig()
    assert short_request(rig) is True
    event(rig)
    assert rig.results() == RELEASED
    assert dropped(rig) == {reason: 5}
    outcomes = [rig.step() for _ in range(4)]
    assert outcomes == [StepOutcome()] * 4
    assert committed(rig) == []
    assert rig.scheduler.request_count == 0


def test_close_ends_it() -> None:
    rig = Rig()
    assert short_request(rig) is True
    rig.scheduler.close()
    assert rig.scheduler.lingering_count == 0
    assert dropped(rig) == {"closed": 5}
    assert rig.results() == RELEASED


def test_engine_short_of_blocks_gets_those_of_the_oldest_back() -> None:
    rig = Rig()
    for index, name in enumerate("abc"):
        assert short_request(rig, name, numbered_chain(5, name), first=10 * index) is True
    rig.scheduler.on_device_blocks_short(6)
    assert rig.results().released == ("a", "b")
    assert dropped(rig) == {"blocks_short": 10}
    rig.step()
    rig.step()
    assert set(committed(rig)) == set(numbered_chain(5, "c"))


@pytest.mark.parametrize(
    "settings",
    [
        ConnectorSettings(stock_blocks=16, lingering_requests_max=2),
        ConnectorSettings(stock_blocks=16, lingering_blocks_max=14),
    ],
    ids=["requests", "blocks"],
)
def test_what_lingers_is_bounded(settings: ConnectorSettings) -> None:
    rig = Rig(settings=settings)
    held = [
        short_request(rig, name, numbered_chain(5, name), first=10 * index)
        for index, name in enumerate("abc")
    ]
    assert held == [True, True, False]
    assert dropped(rig) == {"finished_before_planned": 5}
    rig.check()
    rig.step()
    assert set(rig.step().released) == {"a", "b"}
    assert short_request(rig, "d", numbered_chain(5, "d")) is True


def test_without_a_session_nothing_is_held() -> None:
    rig = Rig()
    rig.client.disconnect()
    assert short_request(rig) is False
    assert dropped(rig) == {"finished_before_planned": 5}


def test_wait_of_zero_holds_nothing() -> None:
    rig = Rig(settings=ConnectorSettings(stock_blocks=16, finish_wait_seconds=0.0))
    assert short_request(rig) is False


def test_failing_match_is_asked_again() -> None:
    rig = Rig()
    rig.client.fail_next("match", Unavailable("slow"))
    assert short_request(rig) is True
    outcomes = [rig.step() for _ in range(5)]
    assert outcomes.count(RELEASED) == 1
    assert committed(rig) == CHAIN


def test_match_that_always_fails_is_given_up_and_released() -> None:
    rig = Rig()
    for _ in range(10):
        rig.client.fail_next("match", Unavailable("slow"))
    assert short_request(rig) is True
    outcomes = [rig.step() for _ in range(10)]
    assert outcomes.count(RELEASED) == 1
    assert dropped(rig) == {"given_up": 5}
    assert rig.client.calls["match"] == 1 + rig.settings.rematches_max


def test_copy_that_fails_while_the_rest_waits_is_made_again() -> None:
    rig = Rig(settings=ConnectorSettings(stock_blocks=2))
    begin(rig, "a", CHAIN)
    assert rig.scheduler.request_finished("a") is True
    rig.copiers[0].failures = 1
    outcomes = [rig.step() for _ in range(10)]
    assert outcomes.count(RELEASED) == 1
    assert committed(rig) == CHAIN
    rig.check_nothing_held()


def test_same_id_again_while_the_first_one_lingers_gets_no_kvtier() -> None:
    rig = Rig()
    assert short_request(rig) is True
    rig.scheduler.on_new_request("a", CHAIN)
    assert rig.scheduler.get_onboard_count("a", 0) == 0
    assert [rig.step(), rig.step()] == [StepOutcome(), RELEASED]
