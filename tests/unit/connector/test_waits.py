"""Blocks on NVMe: who waits for them and how long, what comes of it, and what is held meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.connector.acquire_call import GROW_PAUSES_SECONDS
from kvtier.connector.jobs import StepOutcome
from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.waiting import request_wait_seconds, sources_of
from kvtier.errors import Unavailable
from kvtier.types import TierName
from tests.support.connector_rig import SHARD_BYTES, Rig, content_of, numbered_chain

DRAM, NVME = TierName.DRAM, TierName.NVME
# A block's promotion may take a second: twice its 16 bytes at this rate.
SLOW_DISK = ConnectorSettings(
    stock_blocks=16, nvme_bytes_per_second=2 * SHARD_BYTES, nvme_wait_seconds_max=100.0
)


def demoted(
    memory_count: int = 1, count: int = 4, settings: ConnectorSettings = SLOW_DISK, **options: int
) -> tuple[Rig, list[bytes]]:
    """A rig whose daemon has the chain: its head in memory, the others on NVMe only."""
    rig = Rig(settings=settings, **options)
    chain = numbered_chain(count)
    rig.offload("first", chain)
    if memory_count < count:
        rig.client.demote(rig.namespace, chain[memory_count])
    assert len(rig.namespace.nvme) == count - memory_count
    rig.check_nothing_held()
    return rig, chain


def arrive(rig: Rig, request_id: str, chain: list[bytes], local_count: int = 0) -> int | None:
    """A request whose match is answered before its first scheduling attempt."""
    rig.scheduler.on_new_request(request_id, chain)
    rig.answer()
    return rig.scheduler.get_onboard_count(request_id, local_count)


# ---------------------------------------------------------------------------------- how long


@pytest.mark.parametrize(
    ("lower_bytes", "seconds"),
    [
        (0, 0.05),
        (100, 0.15),
        (10_000_000, 0.15),
        (500_000_000, 1.05),
        (975_000_000, 2.0),
        (10**12, 2.05),
    ],
)
def test_a_request_waits_by_what_lies_on_nvme_and_never_beyond_the_maximum(
    lower_bytes: int, seconds: float
) -> None:
    reading_seconds = lower_bytes / 1e9 if lower_bytes else None
    assert request_wait_seconds(ConnectorSettings(), reading_seconds) == pytest.approx(seconds)


def test_a_long_wait_for_answers_takes_nothing_from_that_for_lower_tiers() -> None:
    settings = ConnectorSettings(onboard_wait_seconds=3.0, nvme_wait_seconds_max=1.0)
    assert request_wait_seconds(settings, 1.0) == 4.0


def test_all_in_memory_keeps_the_short_deadline_and_waits_for_nothing() -> None:
    rig, chain = demoted(memory_count=4)
    assert arrive(rig, "b", chain) is None
    assert rig.control.waiting_count == 0
    rig.clock.advance(rig.settings.onboard_wait_seconds + 0.001)
    assert rig.scheduler.get_onboard_count("b", 0) == 0
    assert rig.scheduler.stats().waiting_acquires == 0


def test_what_the_engine_has_itself_is_not_waited_for() -> None:
    rig, chain = demoted(memory_count=1)
    longer = [*chain, *numbered_chain(1, "tail")]
    rig.scheduler.on_new_request("b", longer)
    rig.answer()
    assert rig.scheduler.get_onboard_count("b", 3) is None
    rig.control.begin_waits()
    assert rig.client.waits_asked == [pytest.approx(1.0)]  # For block 3 alone.


def test_wait_leaves_the_last_part_of_the_deadline_for_its_answer() -> None:
    rig, chain = demoted()
    assert arrive(rig, "b", chain) is None
    assert rig.control.waiting_count == 1
    rig.clock.advance(0.5)  # Its thread was slow to start.
    rig.control.begin_waits()
    assert rig.client.waits_asked == [pytest.approx(3.0 - 0.5)]
    rig.clock.advance(2.5)
    assert rig.scheduler.get_onboard_count("b", 0) is None
    rig.clock.advance(rig.settings.onboard_wait_seconds + 0.001)
    assert rig.scheduler.get_onboard_count("b", 0) == 0
    assert rig.scheduler.stats().deadline_missed_requests == 1


# ---------------------------------------------------------------------------------- what comes


def test_blocks_on_nvme_are_onboarded_with_the_right_bytes_and_counted_by_tier() -> None:
    rig, chain = demoted(memory_count=1)
    assert arrive(rig, "b", chain) is None
    rig.control.begin_waits()
    rig.control.end_waits()
    assert rig.scheduler.get_onboard_count("b", 0) == 4
    rig.scheduler.on_allocated("b", [20, 21, 22, 23], 4)
    assert rig.step() == StepOutcome(onboarded=("b",))
    for index, block_hash in enumerate(chain):
        assert (rig.copiers[0].blocks[20 + index] == content_of(block_hash)).all()
    stats = rig.scheduler.stats()
    assert stats.onboarded_tier_blocks == {DRAM: 1, NVME: 3}
    assert stats.onboarded_blocks == 4
    rig.scheduler.request_finished("b")
    rig.answer()
    rig.check_nothing_held()


def test_only_blocks_that_were_copied_are_counted_by_tier() -> None:
    rig, chain = demoted(memory_count=2)
    assert arrive(rig, "b", chain, local_count=1) is None
    rig.control.begin_waits()
    rig.control.end_waits()
    assert rig.scheduler.get_onboard_count("b", 1) == 3
    rig.scheduler.on_allocated("b", [20, 21], 2)
    rig.copiers[0].failures = 1
    assert rig.step() == StepOutcome(failed=("b",))
    assert rig.scheduler.stats().onboarded_tier_blocks == {}
    rig.scheduler.request_finished("b")
    rig.clock.advance(rig.settings.failed_seconds)
    assert arrive(rig, "c", chain, local_count=1) is None
    rig.answer()
    assert rig.scheduler.get_onboard_count("c", 1) == 3
    rig.scheduler.on_allocated("c", [20, 21], 2)
    assert rig.step() == StepOutcome(onboarded=("c",))
    assert rig.scheduler.stats().onboarded_tier_blocks == {DRAM: 2}  # Promoted for "b".


@pytest.mark.parametrize("is_stocked", [True, False], ids=["deadline", "no space"])
def test_a_cut_wait_onboards_what_it_got(is_stocked: bool) -> None:
    rig, chain = demoted(memory_count=1)
    if is_stocked:
        rig.client.promote_limits = [1]
    else:
        del rig.client.free[1:]
    assert arrive(rig, "b", chain) is None
    rig.control.begin_waits()
    rig.control.end_waits()
    assert rig.scheduler.get_onboard_count("b", 0) == 2
    rig.scheduler.on_allocated("b", [20, 21], 2)
    assert rig.step() == StepOutcome(onboarded=("b",))
    assert rig.scheduler.stats().onboarded_tier_blocks == {DRAM: 1, NVME: 1}
    pauses = 0 if is_stocked else len(GROW_PAUSES_SECONDS)
    assert len(rig.client.waits_asked) == 1 + pauses
    rig.check()


def test_wait_without_room_is_asked_again_while_room_is_being_made() -> None:
    rig, chain = demoted(memory_count=1)
    stock = rig.client.free[:3]
    del rig.client.free[:]
    room = iter([[], stock[:1], [], [], stock[1:]])

    def grow() -> None:
        assert not rig.client.leases, "it holds what others may need"
        rig.clock.advance(0.01)
        rig.client.free += next(room)

    rig.control.on_pause = grow
    assert arrive(rig, "b", chain) is None
    rig.control.begin_waits()
    rig.control.end_waits()
    assert rig.scheduler.get_onboard_count("b", 0) == 4
    first, second, third = GROW_PAUSES_SECONDS
    assert rig.control.pauses == [first, second, first, second, third]
    rig.scheduler.on_allocated("b", [20, 21, 22, 23], 4)
    assert rig.step() == StepOutcome(onboarded=("b",))
    assert rig.scheduler.stats().onboarded_tier_blocks == {DRAM: 1, NVME: 3}
    rig.check()


def test_wait_without_room_ends_with_its_time() -> None:
    rig, chain = demoted(memory_count=1)
    del rig.client.free[:]
    rig.control.on_pause = lambda: rig.clock.advance(2.98)
    assert arrive(rig, "b", chain) is None
    rig.control.begin_waits()
    rig.control.end_waits()
    assert rig.scheduler.get_onboard_count("b", 0) == 1
    assert len(rig.control.pauses) == 1


def test_maximum_of_zero_onboards_what_is_in_memory_at_once() -> None:
    rig, chain = demoted(settings=replace(SLOW_DISK, nvme_wait_seconds_max=0.0))
    assert arrive(rig, "b", chain) is None
    rig.answer()
    assert rig.scheduler.get_onboard_count("b", 0) == 1
    assert rig.client.waits_asked == [0.0]


def test_failing_wait_is_a_miss() -> None:
    rig, chain = demoted()
    rig.client.fail_next("acquire", Unavailable("slow"))
    assert arrive(rig, "b", chain) is None
    rig.control.begin_waits()
    rig.control.end_waits()
    assert rig.scheduler.get_onboard_count("b", 0) == 0
    assert rig.scheduler.lease_count == 0


# ---------------------------------------------------------------------------------- found out late


@pytest.mark.parametrize("memory_count", [0, 1])
def test_acquire_that_finds_blocks_on_nvme_before_the_match_is_made_again_to_wait(
    memory_count: int,
) -> None:
    rig, chain = demoted(memory_count=memory_count)
    longer = [*chain, *numbered_chain(2, "tail")]
    rig.scheduler.on_new_request("b", longer)
    assert rig.scheduler.get_onboard_count("b", 0) is None
    rig.control.step(1)  # The acquire overtakes the match.
    assert rig.client.calls["acquire"] == 1
    assert rig.scheduler.get_onboard_count("b", 0) is None
    assert rig.control.waiting_count == 1
    rig.control.begin_waits()
    # All that was asked for may lie there: nobody knows better yet.
    assert rig.client.waits_asked == [0.0, pytest.approx(6.0 - memory_count)]
    rig.control.end_waits()
    assert rig.scheduler.get_onboard_count("b", 0) == 4
    rig.answer()
    assert len(rig.client.leases) == 1, "the first lease was not released"
    rig.check()


def test_acquire_that_finds_blocks_gone_from_memory_waits_for_those_matched() -> None:
    rig, chain = demoted(memory_count=4)
    longer = [*chain, *numbered_chain(2, "tail")]
    rig.scheduler.on_new_request("b", longer)
    rig.answer()
    rig.client.demote(rig.namespace, chain[1])
    assert rig.scheduler.get_onboard_count("b", 0) is None
    rig.answer()
    assert rig.scheduler.get_onboard_count("b", 0) is None
    rig.control.begin_waits()
    assert rig.client.waits_asked == [0.0, pytest.approx(3.0)]
    rig.control.end_waits()
    assert rig.scheduler.get_onboard_count("b", 0) == 4


# ---------------------------------------------------------------------------------- not wanted


def test_lease_that_comes_after_the_deadline_is_released() -> None:
    rig, chain = demoted()
    assert arrive(rig, "b", chain) is None
    rig.control.begin_waits()
    assert len(rig.client.leases) == 1
    rig.clock.advance(4.0)
    assert rig.scheduler.get_onboard_count("b", 0) == 0
    rig.control.end_waits()
    rig.scheduler.on_results([])
    rig.answer()
    assert not rig.client.leases
    assert rig.scheduler.lease_count == 0
    rig.check()


def test_wait_that_is_not_wanted_any_more_is_not_begun() -> None:
    rig, chain = demoted()
    assert arrive(rig, "b", chain) is None
    rig.scheduler.request_finished("b")
    rig.control.begin_waits()
    rig.control.end_waits()
    rig.scheduler.on_results([])
    assert rig.client.calls["acquire"] == 0
    assert rig.scheduler.lease_count == 0


def test_a_thousand_requests_hold_no_more_than_a_few_waits() -> None:
    rig, chain = demoted(settings=replace(SLOW_DISK, waiting_acquires_max=3))
    for index in range(1000):
        rig.scheduler.on_new_request(f"r{index}", chain)
    rig.answer()
    for index in range(1000):
        assert rig.scheduler.get_onboard_count(f"r{index}", 0) is None
    rig.answer()
    rig.control.begin_waits()
    assert len(rig.client.leases) == rig.client.calls["acquire"] == 3
    rig.clock.advance(3.2)
    for index in range(1000):
        assert rig.scheduler.get_onboard_count(f"r{index}", 0) == 0
    rig.control.end_waits()
    rig.scheduler.build_plan()
    rig.answer()
    assert not rig.client.leases


def test_request_without_a_place_gets_what_is_in_memory_before_its_deadline() -> None:
    rig, chain = demoted(settings=replace(SLOW_DISK, waiting_acquires_max=1))
    assert arrive(rig, "b", chain) is None
    assert arrive(rig, "c", chain) is None
    rig.answer()
    assert rig.client.calls["acquire"] == 0
    rig.clock.advance(3.0)
    assert rig.scheduler.get_onboard_count("c", 0) is None
    rig.answer()
    assert rig.scheduler.get_onboard_count("c", 0) == 1
    assert rig.client.waits_asked == [0.0]


def test_place_that_comes_free_is_taken() -> None:
    rig, chain = demoted(settings=replace(SLOW_DISK, waiting_acquires_max=1))
    assert arrive(rig, "b", chain) is None
    assert arrive(rig, "c", chain) is None
    rig.control.begin_waits()
    rig.control.end_waits()
    assert rig.scheduler.get_onboard_count("b", 0) == 4
    assert rig.scheduler.get_onboard_count("c", 0) is None
    rig.control.begin_waits()
    rig.control.end_waits()
    assert rig.scheduler.get_onboard_count("c", 0) == 4


# ---------------------------------------------------------------------------------- the rest


def test_blocks_on_nvme_need_no_offload() -> None:
    rig, chain = demoted(memory_count=0)
    longer = [*chain, *numbered_chain(1, "tail")]
    before = rig.scheduler.stats().offload_planned_blocks
    rig.compute(longer, list(range(5)))
    rig.scheduler.on_new_request("b", longer)
    rig.answer()
    rig.scheduler.on_blocks_full("b", longer, list(range(5)))
    for _ in range(4):
        rig.step()
    assert rig.scheduler.stats().offload_planned_blocks == before + 1
    assert longer[4] in rig.namespace.resident
    rig.check()


@pytest.mark.parametrize(
    ("tiers", "leased_count", "first", "count", "found"),
    [
        ([(DRAM, 4)], 4, 0, 4, [(DRAM, 4)]),
        ([(DRAM, 2), (NVME, 3)], 5, 1, 3, [(DRAM, 1), (NVME, 2)]),
        ([(DRAM, 2), (NVME, 3)], 5, 2, 1, [(NVME, 1)]),
        ([(DRAM, 1), (NVME, 1), (DRAM, 2)], 4, 1, 3, [(NVME, 1), (DRAM, 2)]),
        ([(NVME, 2)], 5, 3, 2, [(NVME, 2)]),
        ([], 3, 0, 3, []),
    ],
)
def test_each_block_has_one_source(
    tiers: list[tuple[TierName, int]],
    leased_count: int,
    first: int,
    count: int,
    found: list[tuple[TierName, int]],
) -> None:
    assert list(sources_of(tiers, leased_count, first, count)) == found
