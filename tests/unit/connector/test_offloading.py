"""Offload: what is copied out, committed in which order, and what becomes of the slots."""

from __future__ import annotations

from collections import Counter

from kvtier.checksum import combine_checksums, shard_checksum
from kvtier.connector.jobs import FailReason, JobResult, StepOutcome
from kvtier.connector.settings import ConnectorSettings
from kvtier.errors import Unavailable
from tests.support.connector_rig import Rig, begin, chain_of, committed, content_of, numbered_chain


def test_blocks_become_resident_in_chain_order_with_their_bytes() -> None:
    rig = Rig()
    chain = numbered_chain(5)
    begin(rig, "a", chain)
    rig.step()
    assert committed(rig) == chain
    for block_hash, slot in rig.namespace.resident.items():
        assert (rig.client.memory[0][slot] == content_of(block_hash)).all()
    assert rig.scheduler.request_finished("a") is False
    rig.scheduler.on_results([])
    rig.check_nothing_held()


def test_engine_that_does_not_offload_reserves_nothing() -> None:
    rig = Rig(settings=ConnectorSettings(stock_blocks=16, may_offload=False))
    begin(rig, "a", numbered_chain(5))
    for _ in range(3):
        rig.step()
    assert rig.client.calls["reserve"] == 0
    assert committed(rig) == []
    assert rig.scheduler.request_finished("a") is False
    rig.check_nothing_held()


def test_only_blocks_behind_the_resident_prefix_are_copied() -> None:
    rig = Rig()
    chain = numbered_chain(5)
    rig.offload("a", chain[:3])
    rig.copiers[0].copied_out.clear()
    begin(rig, "b", chain, first=10)
    rig.step()
    assert rig.copiers[0].copied_out == [13, 14]


def test_head_evicted_here_but_still_on_the_device_is_offloaded_again() -> None:
    rig = Rig()
    chain = numbered_chain(4)
    rig.offload("a", chain)
    rig.client.evict(rig.namespace, chain[1])
    begin(rig, "b", chain, first=10)
    rig.step()
    rig.step()
    assert set(rig.namespace.resident) == set(chain)
    rig.check()


def test_head_evicted_after_the_match_is_offloaded_again() -> None:
    rig = Rig()
    chain = numbered_chain(4)
    rig.offload("a", chain[:2])
    rig.scheduler.on_new_request("b", chain)
    rig.answer()
    rig.client.evict(rig.namespace, chain[0])
    rig.compute(chain, [10, 11, 12, 13])
    rig.scheduler.on_blocks_full("b", chain, [10, 11, 12, 13])
    rig.step()  # Refused: no parent.
    for _ in range(4):
        rig.step()
    assert set(rig.namespace.resident) == set(chain)
    assert rig.scheduler.stats().dropped_blocks["no_parent"] == 2
    rig.check()


def test_requests_that_share_a_prefix_offload_it_once() -> None:
    rig = Rig()
    shared = numbered_chain(3)
    left, right = shared + numbered_chain(2, "l"), shared + numbered_chain(2, "r")
    begin(rig, "a", left)
    begin(rig, "b", right, first=10)
    for _ in range(3):
        rig.step()
    assert Counter(rig.copiers[0].copied_out) == Counter([0, 1, 2, 3, 4, 13, 14])
    assert set(rig.namespace.resident) == {*left, *right}
    rig.check()


def test_prefix_committed_by_one_request_is_not_copied_by_the_next() -> None:
    rig = Rig()
    chain = numbered_chain(3)
    rig.scheduler.on_new_request("late", chain)
    rig.answer()  # Its match says: nothing resident.
    rig.offload("a", chain)
    rig.copiers[0].copied_out.clear()
    rig.scheduler.on_blocks_full("late", chain, [10, 11, 12])
    rig.step()
    assert rig.copiers[0].copied_out == []


def test_child_copied_first_is_committed_after_its_parent() -> None:
    rig = Rig()
    chain = numbered_chain(4)
    begin(rig, "a", chain[:2])
    begin(rig, "b", chain, first=10)
    jobs = rig.plan().offloads
    assert [job.request_id for job in jobs] == ["a", "b"]
    rig.scheduler.on_results([JobResult(jobs[1].job_id, 0, None)])
    rig.answer()
    assert rig.client.commits == []
    rig.scheduler.on_results([JobResult(jobs[0].job_id, 0, None)])
    rig.answer()
    assert committed(rig) == chain
    rig.scheduler.on_results([])
    rig.check()


def test_child_of_a_failed_parent_is_refused_and_both_are_offloaded_again() -> None:
    rig = Rig()
    chain = numbered_chain(4)
    begin(rig, "a", chain[:2])
    begin(rig, "b", chain, first=10)
    jobs = rig.plan().offloads
    rig.scheduler.on_results([JobResult(jobs[1].job_id, 0, None)])
    rig.scheduler.on_results([JobResult(jobs[0].job_id, 0, FailReason.COPY)])
    rig.answer()
    assert committed(rig) == []
    rig.lanes[0].copies.clear()
    for _ in range(4):
        rig.step()
    assert set(rig.namespace.resident) == set(chain)
    rig.check()


def test_block_counts_as_copied_after_every_worker_reported() -> None:
    rig = Rig(worker_count=2)
    chain = numbered_chain(2)
    begin(rig, "a", chain)
    rig.plan()
    rig.lanes[1].step()
    rig.results()
    rig.answer()
    assert rig.client.commits == []
    assert rig.scheduler.request_finished("a") is True
    rig.lanes[0].step()
    assert rig.results() == StepOutcome(released=("a",))
    rig.answer()
    assert committed(rig) == chain


def test_finished_request_is_released_once_and_its_last_blocks_still_offloaded() -> None:
    rig = Rig()
    chain = numbered_chain(3)
    begin(rig, "a", chain)
    assert rig.scheduler.request_finished("a") is True
    assert rig.step() == StepOutcome(released=("a",))
    assert rig.step() == StepOutcome()
    assert committed(rig) == chain
    assert rig.scheduler.request_count == 0
    rig.check_nothing_held()


def test_match_made_before_the_hook_returns_is_believed() -> None:
    rig = Rig()
    chain = numbered_chain(3)
    rig.control.is_eager = True
    begin(rig, "a", chain)
    rig.step()
    assert rig.client.calls["match"] == 1
    assert committed(rig) == chain
    rig.check()


def test_short_stock_offloads_the_head_first_and_the_rest_later() -> None:
    rig = Rig(settings=ConnectorSettings(stock_blocks=2))
    chain = numbered_chain(7)
    begin(rig, "a", chain)
    rig.step()
    assert committed(rig) == chain[:2]
    for _ in range(8):
        rig.step()
    assert committed(rig) == chain
    rig.check()


def test_full_daemon_is_asked_again_only_after_a_pause() -> None:
    rig = Rig(slot_count=2, settings=ConnectorSettings(stock_blocks=4))
    begin(rig, "a", numbered_chain(6))
    for _ in range(10):
        rig.step()
    asked = rig.client.calls["reserve"]
    for _ in range(10):
        rig.step()
    assert rig.client.calls["reserve"] == asked
    rig.clock.advance(rig.settings.reserve_retry_seconds)
    rig.step()
    assert rig.client.calls["reserve"] == asked + 1


def test_blocks_in_flight_are_bounded() -> None:
    settings = ConnectorSettings(stock_blocks=32, offload_blocks_max=3)
    rig = Rig(settings=settings)
    chain = numbered_chain(8)
    begin(rig, "a", chain)
    assert sum(len(job.slots) for job in rig.plan().offloads) == 3
    assert rig.plan().offloads == ()
    rig.copy()
    rig.results()
    rig.answer()
    for _ in range(6):
        rig.step()
    assert committed(rig) == chain


def test_failed_copy_gives_its_slots_back_and_is_tried_again() -> None:
    rig = Rig()
    chain = numbered_chain(3)
    rig.copiers[0].failures = 1
    begin(rig, "a", chain)
    rig.step()
    assert committed(rig) == []
    for _ in range(3):
        rig.step()
    assert committed(rig) == chain
    rig.check()


def test_copy_that_always_fails_is_given_up() -> None:
    rig = Rig()
    rig.copiers[0].failures = 1_000
    begin(rig, "a", numbered_chain(3))
    for _ in range(20):
        rig.step()
    assert 1_000 - rig.copiers[0].failures == 1 + rig.settings.rematches_max
    rig.check()


def test_failing_commit_drops_the_blocks_and_looks_again() -> None:
    rig = Rig()
    chain = numbered_chain(3)
    begin(rig, "a", chain)
    rig.client.fail_next("commit", Unavailable("slow"))
    rig.step()
    rig.scheduler.on_results([])
    assert rig.scheduler.stats().dropped_blocks["commit_failed"] == 3
    for _ in range(4):
        rig.step()
    assert committed(rig) == chain


def test_recall_gives_back_slots_that_nobody_was_given() -> None:
    rig = Rig()
    chain = numbered_chain(3)
    begin(rig, "a", chain)
    rig.plan()
    free_count = len(rig.client.free)
    rig.client.recall(rig.namespace, 5)
    rig.scheduler.on_results([])
    rig.answer()
    assert len(rig.client.free) == free_count + 5
    rig.copy()
    rig.results()
    rig.answer()
    assert committed(rig) == chain
    rig.check()


def test_stock_respects_the_daemons_limit() -> None:
    rig = Rig(settings=ConnectorSettings(stock_blocks=16))
    rig.client.reconnect()
    rig.client.stock_count_max = 3
    chain = numbered_chain(9)
    begin(rig, "a", chain)
    for _ in range(12):
        rig.step()
        assert len([s for s in rig.client.reserved.values() if s == rig.client.session]) <= 3
    assert committed(rig) == chain


def test_shorter_or_uneven_chains_are_taken_as_far_as_they_go() -> None:
    rig = Rig()
    chain = numbered_chain(4)
    rig.scheduler.on_new_request("a", chain)
    rig.answer()
    rig.compute(chain, [0, 1, 2, 3])
    rig.scheduler.on_blocks_full("a", chain, [0, 1])
    rig.scheduler.on_blocks_full("a", chain[:1], [0])
    rig.step()
    assert committed(rig) == chain[:2]


def test_chain_that_changed_under_the_same_request_is_planned_anew() -> None:
    rig = Rig()
    old, new = chain_of("a", "b"), chain_of("a", "c", "d")
    begin(rig, "a", old)
    rig.step()
    rig.compute(new, [10, 11, 12])
    rig.scheduler.on_blocks_full("a", new, [10, 11, 12])
    for _ in range(3):
        rig.step()
    assert set(rig.namespace.resident) == {*old, *new}


def test_without_a_daemon_nothing_is_planned() -> None:
    rig = Rig()
    rig.client.disconnect()
    begin(rig, "a", numbered_chain(3))
    assert rig.step() == StepOutcome()
    assert rig.plans[-1].offloads == ()
    assert rig.scheduler.request_finished("a") is False


def test_by_value_sessions_plan_nothing() -> None:
    rig = Rig()
    rig.client.by_value = True
    begin(rig, "a", numbered_chain(3))
    rig.step()
    assert rig.plans[-1].offloads == ()


def test_worker_checksums_reach_the_commit_in_shard_order() -> None:
    settings = ConnectorSettings(worker_count=2, stock_blocks=8, worker_checksums=True)
    rig = Rig(worker_count=2, settings=settings)
    chain = numbered_chain(1)
    begin(rig, "a", chain)
    rig.plan()
    for lane in reversed(rig.lanes):
        lane.step()
    rig.scheduler.on_results([*rig.workers[1].poll(), *rig.workers[0].poll()])
    rig.answer()
    shards = [shard_checksum(content_of(chain[0], shard)) for shard in (0, 1)]
    assert [c.checksum for c in rig.client.commits] == [combine_checksums(shards)]


def test_counters_reconcile_when_nothing_is_in_flight() -> None:
    rig = Rig()
    chain = numbered_chain(6)
    rig.offload("a", chain)
    rig.client.evict(rig.namespace, chain[3])
    begin(rig, "b", chain, first=10)
    rig.plan()
    rig.scheduler.on_preempted("b")
    rig.copy()
    rig.results()
    rig.answer()
    stats = rig.scheduler.stats()
    ended = stats.committed_blocks + stats.present_blocks + stats.dropped_blocks["preempted"]
    assert stats.offload_planned_blocks == ended == 9


def test_close_gives_stock_and_leases_back() -> None:
    rig = Rig()
    chain = numbered_chain(3)
    rig.offload("a", chain)
    rig.onboard("b", chain, first=20)
    rig.scheduler.close()
    assert not rig.client.reserved
    assert not rig.client.leases
    assert rig.client.violations == []
