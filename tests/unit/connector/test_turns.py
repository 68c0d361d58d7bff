"""How many leases an engine holds at once, and what becomes of those whose turn has not come."""

from __future__ import annotations

from kvtier.connector.settings import ConnectorSettings
from tests.support.connector_rig import Rig, numbered_chain

BLOCK_COUNT = 8


def rig_of(**settings: float) -> Rig:
    rig = Rig(slot_count=256, settings=ConnectorSettings(stock_blocks=16, **settings))  # type: ignore[arg-type]
    rig.offload("stored", numbered_chain(BLOCK_COUNT))
    return rig


def ask(rig: Rig, names: list[str]) -> list[int | None]:
    return [rig.scheduler.get_onboard_count(name, 0) for name in names]


def begin_many(rig: Rig, count: int) -> list[str]:
    names = [f"r{index}" for index in range(count)]
    for name in names:
        rig.scheduler.on_new_request(name, numbered_chain(BLOCK_COUNT))
    rig.answer()
    return names


def test_leases_together_pin_no_more_than_their_limit() -> None:
    rig = rig_of(leased_blocks_max=2 * BLOCK_COUNT)
    names = begin_many(rig, 5)
    ask(rig, names)
    rig.answer()
    assert ask(rig, names) == [BLOCK_COUNT, BLOCK_COUNT, None, None, None]
    assert rig.scheduler.lease_count == 2


def test_one_lease_may_be_larger_than_the_limit() -> None:
    rig = rig_of(leased_blocks_max=1)
    names = begin_many(rig, 2)
    ask(rig, names)
    rig.answer()
    assert ask(rig, names) == [BLOCK_COUNT, None]


def test_request_waits_for_its_turn_longer_than_for_an_answer() -> None:
    rig = rig_of(acquires_in_flight_max=1, onboard_wait_seconds=0.05, turn_wait_seconds=2.0)
    names = begin_many(rig, 2)
    ask(rig, names)
    rig.answer()
    assert ask(rig, names) == [BLOCK_COUNT, None]
    rig.clock.advance(1.0)
    assert ask(rig, names) == [BLOCK_COUNT, None]
    rig.scheduler.request_finished("r0")
    assert ask(rig, ["r1"]) == [None]
    rig.answer()
    assert ask(rig, ["r1"]) == [BLOCK_COUNT]
    assert rig.scheduler.stats().deadline_missed_requests == 0


def test_turn_that_does_not_come_is_a_miss() -> None:
    rig = rig_of(acquires_in_flight_max=1, turn_wait_seconds=2.0)
    names = begin_many(rig, 2)
    ask(rig, names)
    rig.answer()
    assert ask(rig, names) == [BLOCK_COUNT, None]
    rig.clock.advance(2.1)
    assert ask(rig, ["r1"]) == [0]
    assert rig.scheduler.stats().deadline_missed_requests == 1


def test_turn_is_waited_for_as_long_as_those_in_front_get_on() -> None:
    rig = rig_of(acquires_in_flight_max=1, turn_wait_seconds=2.0)
    names = begin_many(rig, 6)
    for first in range(5):  # Two seconds and a half, in all.
        ask(rig, names[first:])
        rig.answer()
        assert ask(rig, names[first:])[:2] == [BLOCK_COUNT, None]
        rig.clock.advance(0.5)
        rig.scheduler.request_finished(names[first])
    ask(rig, ["r5"])
    rig.answer()
    assert ask(rig, ["r5"]) == [BLOCK_COUNT]
    assert rig.scheduler.stats().deadline_missed_requests == 0


def test_turn_is_not_waited_for_while_later_requests_overtake() -> None:
    rig = rig_of(leased_blocks_max=BLOCK_COUNT, turn_wait_seconds=2.0)
    names = begin_many(rig, 1)
    rig.scheduler.on_new_request("large", numbered_chain(BLOCK_COUNT))
    small = [f"small{index}" for index in range(5)]
    for name in small:
        rig.scheduler.on_new_request(name, numbered_chain(BLOCK_COUNT)[:2])
    rig.answer()
    rig.scheduler.request_finished(names[0])
    ask(rig, small[:1])
    rig.answer()
    answers = []
    for first in range(4):  # One of two is always held, so that the large one never fits.
        answers += ask(rig, ["large", small[first + 1]])
        rig.clock.advance(0.6)
        rig.answer()
        rig.scheduler.request_finished(small[first])
    assert ask(rig, ["large"]) == [0]
    assert set(answers) == {None}


def test_blocks_that_came_after_the_match_are_counted_before_they_are_leased() -> None:
    rig = Rig(slot_count=256, settings=ConnectorSettings(stock_blocks=16, leased_blocks_max=10))
    rig.offload("stored", numbered_chain(1))
    names = begin_many(rig, 5)
    rig.offload("more", numbered_chain(BLOCK_COUNT))
    rig.clock.advance(1.0)
    ask(rig, names)
    rig.answer()
    assert sum(len(slots) for slots in rig.client.leases.values()) <= 10


def test_own_cache_that_covered_all_and_was_evicted_is_made_up_for() -> None:
    rig = rig_of()
    rig.scheduler.on_new_request("r", numbered_chain(BLOCK_COUNT))
    rig.answer()
    assert rig.scheduler.get_onboard_count("r", BLOCK_COUNT) == 0
    assert rig.scheduler.get_onboard_count("r", 0) is None
    rig.answer()
    assert rig.scheduler.get_onboard_count("r", 0) == BLOCK_COUNT


def test_what_is_being_onboarded_is_told_by_tier() -> None:
    rig = rig_of()
    assert rig.scheduler.onboard_sources("nobody") == ()
    rig.onboard("r", numbered_chain(BLOCK_COUNT), 20)
    assert rig.scheduler.onboard_sources("r") == (("dram", BLOCK_COUNT),)
