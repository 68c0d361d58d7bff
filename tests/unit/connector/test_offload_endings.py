"""Offload cut short: preemption, reset, cleared namespaces and lost sessions."""

from __future__ import annotations

import pytest

from kvtier.connector.jobs import JobResult, StepOutcome
from kvtier.connector.settings import ConnectorSettings
from tests.support.connector_rig import Rig, begin, committed, numbered_chain, spec_of


def test_preempted_without_holding_commits_nothing_of_what_was_copied() -> None:
    rig = Rig()
    chain = numbered_chain(3)
    device_blocks = begin(rig, "a", chain)
    rig.plan()
    assert rig.scheduler.on_preempted("a") is False
    rig.compute(numbered_chain(3, "other"), device_blocks)  # The engine reuses them at once.
    rig.copy()
    assert rig.results() == StepOutcome()
    rig.answer()
    assert rig.namespace.resident == {}
    rig.scheduler.request_finished("a")
    rig.check_nothing_held()


def test_preempted_with_holding_commits_and_releases() -> None:
    rig = Rig(settings=ConnectorSettings(stock_blocks=16, holds_preempted_blocks=True))
    chain = numbered_chain(3)
    begin(rig, "a", chain)
    rig.plan()
    assert rig.scheduler.on_preempted("a") is True
    rig.copy()
    assert rig.results() == StepOutcome(released=("a",))
    rig.answer()
    assert committed(rig) == chain


def test_two_preemptions_are_released_together_once() -> None:
    rig = Rig(settings=ConnectorSettings(stock_blocks=16, holds_preempted_blocks=True))
    chain = numbered_chain(4)
    begin(rig, "a", chain[:2])
    rig.plan()
    assert rig.scheduler.on_preempted("a") is True
    rig.compute(chain, [10, 11, 12, 13])
    rig.scheduler.on_blocks_full("a", chain, [10, 11, 12, 13])
    assert rig.scheduler.request_finished("a") is True
    released = [rig.step().released for _ in range(6)]
    assert [names for names in released if names] == [("a",)]
    assert set(rig.namespace.resident) == set(chain)
    assert rig.scheduler.request_count == 0


def test_reset_commits_nothing_of_the_old_weights() -> None:
    rig = Rig()
    chain = numbered_chain(3)
    begin(rig, "a", chain)
    rig.plan()
    rig.scheduler.reset(spec_of("v2"))
    rig.copy()
    rig.results()
    rig.answer()
    assert rig.namespace.resident == {}
    # It may go on with KV of both weights: nothing of it is offloaded until it restarts.
    rig.scheduler.on_blocks_full("a", [*chain, b"x" * 16], [0, 1, 2, 3])
    for _ in range(3):
        assert rig.step() == StepOutcome()
    new_namespace = rig.client.open_namespace(spec_of("v2"))
    assert new_namespace.resident == {}
    rig.scheduler.on_preempted("a")
    rig.compute(chain, [4, 5, 6], weights="v2")
    rig.scheduler.on_blocks_full("a", chain, [4, 5, 6])
    for _ in range(3):
        rig.step()
    assert set(new_namespace.resident) == set(chain)
    rig.check()


def test_reset_while_a_copied_block_waits_for_its_parent_frees_its_slot() -> None:
    rig = Rig()
    chain = numbered_chain(4)
    begin(rig, "a", chain[:2])
    begin(rig, "b", chain, first=10)
    jobs = rig.plan().offloads
    rig.scheduler.on_results([JobResult(jobs[1].job_id, 0, None)])
    rig.scheduler.reset(spec_of("v2"))
    rig.copy()
    rig.results()
    rig.answer()
    rig.scheduler.on_results([])
    for name in "ab":
        rig.scheduler.request_finished(name)
    rig.step()
    rig.scheduler.on_results([])
    rig.check_nothing_held()


def test_slots_reserved_for_the_old_namespace_arrive_in_vain() -> None:
    rig = Rig()
    rig.client.during["reserve"] = lambda: rig.scheduler.reset(spec_of("v2"))
    rig.client.recall(rig.namespace, 16)
    rig.scheduler.on_results([])
    rig.clock.advance(rig.settings.recall_pause_seconds)
    rig.plan()
    rig.answer()
    rig.scheduler.on_results([])
    rig.answer()
    assert rig.client.during == {}
    assert not rig.client.reserved
    assert rig.scheduler.stock_count == 0
    rig.check()


def test_cleared_namespace_throws_the_stock_away_and_goes_on() -> None:
    rig = Rig()
    chain = numbered_chain(3)
    rig.client.clear(rig.namespace)
    begin(rig, "a", chain)
    rig.step()
    rig.scheduler.on_results([])
    assert rig.scheduler.stats().dropped_blocks["void"] == 3
    for _ in range(4):
        rig.step()
    assert set(rig.namespace.resident) == set(chain)
    rig.check()


def test_new_session_drops_the_stock_and_starts_anew() -> None:
    rig = Rig()
    chain = numbered_chain(3)
    rig.client.reconnect(restarted=True)
    begin(rig, "a", chain)
    for _ in range(4):
        rig.step()
    assert set(rig.namespace.resident) == set(chain)
    rig.check()


def test_session_lost_while_copying_fails_the_copy_and_then_offloads_again() -> None:
    rig = Rig()
    chain = numbered_chain(3)
    begin(rig, "a", chain)
    rig.plan()
    rig.client.reconnect(restarted=True)
    rig.copy()
    rig.results()
    for _ in range(4):
        rig.step()
    assert set(rig.namespace.resident) == set(chain)
    rig.client.quiet()
    rig.scheduler.request_finished("a")
    rig.check_nothing_held()


def test_job_finished_just_before_the_session_was_lost_is_not_committed() -> None:
    rig = Rig()
    begin(rig, "a", numbered_chain(3))
    rig.plan()
    rig.copy()
    rig.client.reconnect()
    rig.results()
    rig.answer()
    assert rig.client.commits == []
    assert rig.scheduler.stats().dropped_blocks["session_lost"] == 3


@pytest.mark.parametrize("restarted", [False, True])
def test_quiet_returns_what_a_lost_session_held(restarted: bool) -> None:
    rig = Rig()
    begin(rig, "a", numbered_chain(3))
    rig.plan()
    rig.client.reconnect(restarted=restarted)
    rig.copy()
    rig.client.quiet()
    rig.results()
    rig.answer()
    rig.scheduler.request_finished("a")
    rig.step()
    rig.step()
    rig.scheduler.on_results([])
    rig.check_nothing_held()
