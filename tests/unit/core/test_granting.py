"""Leases on blocks of two tiers: cut at once where they must be, and answered in time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.events import TransferOutcome
from kvtier.errors import Unauthenticated
from kvtier.types import Cut, LeaseId, SlabSetId, TierName
from tests.support.world import chain, packed
from tests.unit.core.test_demotions import TIERED, TieredStory
from tests.unit.core.test_manager import NS

HALF = "abcdefgh"  # Half of memory: what leases may pin.


@pytest.fixture
def story() -> TieredStory:
    return TieredStory()


def ready(story: TieredStory, pending: ins.LeasePending) -> ins.LeaseGranted:
    assert pending.lease in story.world.granted, "it still waits"
    return story.world.granted[pending.lease]


def release(story: TieredStory, lease: LeaseId | None) -> None:
    assert lease is not None
    story.world.run(ev.Release(story.session, (lease,)))


# ----------------------------------------------------------------------------------------- waiting


def test_blocks_in_memory_are_leased_at_once_whatever_is_being_read(story: TieredStory) -> None:
    story.write_behind("abcd")
    story.leave_memory()
    story.offload("xy")
    story.acquire_pending("abcd")
    granted = story.acquire_waiting("xy")
    assert isinstance(granted, ins.LeaseGranted)
    assert (granted.leased_count, granted.tiers) == (2, ((TierName.DRAM, 2),))


def test_a_lease_that_does_not_wait_is_on_what_is_in_memory(story: TieredStory) -> None:
    story.write_behind("abcd")
    story.leave_memory()
    story.acquire_pending("ab")
    story.world.finish_work()
    granted = story.acquire("abcd")
    assert (granted.leased_count, granted.cut) == (2, Cut.DEADLINE)
    assert not story.under_way


def test_a_pending_lease_tells_what_it_waits_for(story: TieredStory) -> None:
    story.write_behind("abcd")
    story.leave_memory()
    story.acquire_pending("ab")
    story.world.finish_work()
    pending = story.acquire_pending("abcde")
    assert (pending.matched_count, pending.memory_count) == (4, 2)
    story.world.finish_work()
    granted = ready(story, pending)
    assert (granted.leased_count, granted.cut) == (4, Cut.MISS)
    assert granted.tiers == ((TierName.DRAM, 2), (TierName.NVME, 2))


def test_blocks_that_the_engine_has_itself_are_neither_read_nor_waited_for(
    story: TieredStory,
) -> None:
    story.write_behind("abcd")
    story.leave_memory()
    pending = story.acquire_waiting("abcd", skip=2)
    assert isinstance(pending, ins.LeasePending)
    assert [len(one.asked.slots) for one in story.under_way] == [2]
    story.world.finish_work()
    granted = ready(story, pending)
    assert (granted.leased_count, len(granted.slots)) == (4, 2)
    assert story.in_memory("abcd") == 2


def test_a_wait_ends_at_its_deadline_and_the_slot_stays_taken_until_the_read_has_returned(
    story: TieredStory,
) -> None:
    story.write_behind("ab")
    story.leave_memory()
    pending = story.acquire_pending("ab", wait=2.0)
    assert story.world.manager.next_deadline() == 2.0
    story.tick(2.0)
    granted = ready(story, pending)
    assert (granted.lease, granted.cut) == (None, Cut.DEADLINE)
    [transfer] = story.under_way
    assert story.free_count() == 14
    assert set(story.reserve(16)).isdisjoint(transfer.asked.slots.tolist())
    story.mover.finish(transfer)
    assert story.in_memory("ab") == 2  # It was not for nothing.
    assert story.acquire("ab").leased_count == 2


def test_what_has_come_by_the_deadline_is_leased() -> None:
    nvme = replace(TIERED.lower[TierName.NVME], batch_blocks=1, transfer_blocks_max=2)
    story = TieredStory(replace(TIERED, lower={TierName.NVME: nvme}))
    story.write_behind("abcd")
    story.leave_memory()
    pending = story.acquire_pending("abcd", wait=2.0)
    story.mover.finish(story.under_way[1])  # The second block comes first.
    assert pending.lease in story.world.waiting
    story.mover.finish(story.under_way[0])
    story.tick(2.0)
    granted = ready(story, pending)
    assert (granted.leased_count, granted.cut) == (2, Cut.DEADLINE)
    story.world.finish_work()
    release(story, granted.lease)
    story.world.check([chain("abcd")])


def test_what_nobody_waits_for_any_more_is_not_read_and_its_slots_are_free() -> None:
    nvme = replace(TIERED.lower[TierName.NVME], batch_blocks=1, transfer_blocks_max=1)
    for is_released in (False, True):
        story = TieredStory(replace(TIERED, lower={TierName.NVME: nvme}))
        story.write_behind("abcd")
        story.leave_memory()
        pending = story.acquire_pending("abcd", wait=2.0)
        assert story.free_count() == 12
        if is_released:
            release(story, pending.lease)
        else:
            story.tick(2.0)
        assert story.free_count() == 15
        story.world.finish_work()
        assert story.in_memory("abcd") == 1


def test_a_lease_that_waits_past_its_own_deadline_is_answered_by_then(story: TieredStory) -> None:
    story.write_behind("ab")
    story.leave_memory()
    pending = story.acquire_waiting("ab", wait=60.0, seconds=10.0)
    assert isinstance(pending, ins.LeasePending)
    story.tick(10.0)
    assert ready(story, pending).cut is Cut.DEADLINE
    story.tick(100.0)
    assert story.world.manager.stats().lease_count == 0


def test_a_released_lease_is_not_answered(story: TieredStory) -> None:
    story.write_behind("ab")
    story.leave_memory()
    pending = story.acquire_pending("ab")
    release(story, pending.lease)
    story.world.finish_work()
    assert not story.world.granted
    assert story.world.manager.stats().lease_count == 0
    story.world.check([chain("ab")])


# ------------------------------------------------------------------------------------ cut at once


def test_a_prefix_larger_than_memory_is_cut_at_once() -> None:
    """Of leases: half of memory."""
    story = TieredStory(segment_count=8)
    story.write_behind(HALF)
    story.leave_memory()
    story.write_behind(HALF + "ijklmnop")
    story.leave_memory()
    outcome = story.acquire_waiting(HALF + "ijklmnop")
    assert isinstance(outcome, ins.LeasePending)
    assert outcome.matched_count == 8
    story.world.finish_work()
    granted = ready(story, outcome)
    assert (granted.leased_count, granted.cut) == (8, Cut.PIN_LIMIT)


def test_two_acquires_that_together_exceed_memory_are_cut_at_once(story: TieredStory) -> None:
    story.write_behind(HALF)
    story.leave_memory()
    story.write_behind("stuvwx")
    story.leave_memory()
    first, second = story.acquire_pending("abcdef"), story.acquire_pending("stuvwx")
    assert (first.matched_count, second.matched_count) == (6, 2)
    story.world.finish_work()
    assert ready(story, first).cut is Cut.NONE
    assert ready(story, second).cut is Cut.PIN_LIMIT


def test_a_lease_is_cut_at_once_where_there_is_no_slot(story: TieredStory) -> None:
    story.write_behind("abcd")
    story.leave_memory()
    story.reserve(14)
    pending = story.acquire_pending("abcd")
    assert pending.matched_count == 2
    story.world.finish_work()
    assert ready(story, pending).cut is Cut.NO_SPACE
    refused = story.acquire_waiting("abcd", skip=2)
    assert isinstance(refused, ins.LeaseGranted)
    assert (refused.lease, refused.cut) == (None, Cut.NO_SPACE)


def test_blocks_of_a_pool_that_is_gone_are_no_lack_of_room(story: TieredStory) -> None:
    story.write_behind("ab")
    story.leave_memory()
    assert story.world.nvme is not None
    story.world.start(ev.LowerChanged(readable=False))
    outcomes: list[object] = []
    acquire = ev.Acquire(story.session, NS, packed(chain("ab")), 10.0, wait_until=5.0)
    story.world.start(acquire, outcomes.append)
    [granted] = outcomes
    assert isinstance(granted, ins.LeaseGranted)
    assert (granted.lease, granted.cut) == (None, Cut.MISS)


def test_a_block_of_the_chain_is_pinned_before_room_is_made_for_another(
    story: TieredStory,
) -> None:
    """Of a and ab the first one is on NVMe; the second is the next victim and has no copy."""
    story.write_behind("a")
    story.leave_memory()
    story.commit(chain("ab")[1:], story.reserve(1), parent=chain("a")[0])
    story.mover.finish(story.under_way[0], TransferOutcome.FAILED)
    story.world.now = 1.0
    story.write_behind("cdefghijklmnopq")  # Memory is full.
    story.world.now = 2.0
    pending = story.acquire_pending("ab")
    story.world.finish_work()
    assert ready(story, pending).leased_count == 2
    story.world.check([chain("ab")])


def test_promoting_a_chain_does_not_evict_it(story: TieredStory) -> None:
    """Its head is the block used longest ago; room is made for the rest."""
    story.write_behind("abcd")
    story.leave_memory()
    story.acquire_pending("ab")
    story.world.finish_work()
    release(story, next(iter(story.world.granted)))
    story.world.now = 1.0
    story.offload("ghijklmnopqrst")  # Memory is full.
    story.world.finish_work()
    story.world.now = 2.0
    pending = story.acquire_pending("abcd")
    story.world.finish_work()
    assert ready(story, pending).leased_count == 4
    story.world.check([chain("abcd")])


# -------------------------------------------------------------------------------------- bad endings


def test_a_lease_whose_blocks_are_cleared_is_answered_at_once(story: TieredStory) -> None:
    story.write_behind("abcd")
    story.leave_memory()
    pending = story.acquire_pending("abcd")
    story.world.clear(NS)
    story.world.finish_turns()
    assert ready(story, pending).cut is Cut.MISS
    assert story.under_way  # Nor has it waited for these.


def test_a_lease_whose_slots_are_withdrawn_is_answered_at_once(story: TieredStory) -> None:
    story.write_behind("ab")
    story.leave_memory()
    pending = story.acquire_pending("ab")
    story.world.run(ev.WithdrawSlabSet(SlabSetId(1)))
    assert ready(story, pending).cut is Cut.MISS


def test_a_lease_ends_where_a_block_in_memory_was_voided_while_it_waited(
    story: TieredStory,
) -> None:
    story.write_behind("abcd")
    story.leave_memory()
    story.acquire_pending("ab")
    story.world.finish_work()
    [granted] = story.world.granted.values()
    pending = story.acquire_pending("abcd")
    story.world.scribble(int(granted.slots[0]))
    story.world.run(ev.SlotsCorrupt(NS, granted.slots[:1]))
    story.world.finish_work()
    assert ready(story, pending).lease is None
    story.world.check([chain("abcd")])


def test_a_session_that_is_lost_between_two_slices_leaves_no_pin(story: TieredStory) -> None:
    """The second slice would pin two blocks in memory."""
    story.write_behind("ab")
    story.leave_memory()
    story.commit(chain("abcd")[2:], story.reserve(2), parent=chain("ab")[1])
    outcomes: list[object] = []
    acquire = ev.Acquire(story.session, NS, packed(chain("abcd")), 10.0, wait_until=5.0)
    story.world.start(acquire, outcomes.append)
    story.engine.lose(story.engine.scheduler)
    story.world.finish_turns()
    assert isinstance(outcomes[0], Unauthenticated)
    story.world.check([chain("abcd")])  # Pins and leases agree.


def test_of_an_engine_that_died_nothing_is_left_but_reads_under_way(story: TieredStory) -> None:
    story.write_behind("abcd")
    story.leave_memory()
    story.acquire_pending("abcd")
    story.engine.die(story.engine.scheduler)
    story.world.finish_work()
    story.world.check([chain("abcd")])
    story.tick(100.0)
    story.world.assert_all_free()


def test_a_read_that_fails_cuts_only_those_leases_that_wait_for_it() -> None:
    nvme = replace(TIERED.lower[TierName.NVME], batch_blocks=2)
    story = TieredStory(replace(TIERED, lower={TierName.NVME: nvme}))
    for path in ("ab", "xy"):
        story.write_behind(path)
    story.leave_memory()
    first, second = story.acquire_pending("ab"), story.acquire_pending("xy")
    story.mover.finish(story.under_way[0], TransferOutcome.FAILED)
    assert ready(story, first).cut is Cut.MISS
    assert second.lease in story.world.waiting
    story.world.finish_work()
    assert ready(story, second).leased_count == 2
