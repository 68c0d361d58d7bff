"""Promotion: what comes up, in which order, and what becomes of both ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.events import TransferOutcome
from kvtier.types import CommitOutcome, Cut, SlabSetId, TierName
from tests.support.world import chain, packed
from tests.unit.core.test_demotions import TIERED, TieredStory, names
from tests.unit.core.test_manager import NS, SLOT_BYTES


@pytest.fixture
def story() -> TieredStory:
    return TieredStory()


@pytest.fixture
def one_at_a_time() -> TieredStory:
    """Only one batch of two blocks is read at the same time."""
    nvme = replace(TIERED.lower[TierName.NVME], transfer_bytes_max=SLOT_BYTES, batch_blocks=2)
    return TieredStory(replace(TIERED, lower={TierName.NVME: nvme}))


def read_names(story: TieredStory) -> list[str]:
    """Blocks being read now."""
    return [
        names([story.disk.rows[slot].block])[0]
        for one in story.under_way
        if not one.is_demotion
        for slot in one.asked.lower_slots.tolist()
    ]


def prefetch(story: TieredStory, path: str) -> ins.PrefetchBegun:
    outcome = story.world.run(ev.Prefetch(NS, packed(chain(path))))
    assert isinstance(outcome, ins.PrefetchBegun)
    return outcome


# ------------------------------------------------------------------------------------------ copies


def test_a_promoted_block_keeps_its_copy(story: TieredStory) -> None:
    story.write_behind("abc")
    story.leave_memory()
    pending = story.acquire_pending("abc")
    story.world.finish_work()
    granted = story.world.granted[pending.lease]
    assert granted.tiers == ((TierName.NVME, 3),)
    assert (story.in_memory("abc"), story.on_nvme("abc")) == (3, 3)
    story.world.run(ev.Release(story.session, (pending.lease,)))
    story.leave_memory()
    assert (story.matched("abc"), story.disk.written_count) == (3, 3)


def test_promoted_blocks_are_those_that_were_demoted(story: TieredStory) -> None:
    story.write_behind("abcd")
    story.leave_memory()
    story.acquire_pending("abcd")
    story.world.finish_work()
    [granted] = story.world.granted.values()
    for slot, block in zip(granted.slots.tolist(), chain("abcd"), strict=True):
        assert story.world.is_right(slot, 0, block)


def test_a_block_is_promoted_once_however_many_wait_for_it(story: TieredStory) -> None:
    story.write_behind("ab")
    story.leave_memory()
    first, second = story.acquire_pending("ab"), story.acquire_pending("ab")
    assert read_names(story) == ["a", "ab"]
    story.world.finish_work()
    granted = story.world.granted
    assert granted[first.lease].slots.tolist() == granted[second.lease].slots.tolist()


def test_a_block_that_somebody_commits_while_it_is_read_is_present(story: TieredStory) -> None:
    story.write_behind("ab")
    story.leave_memory()
    story.acquire_pending("ab")
    assert story.commit(chain("ab"), story.reserve(2)) == [CommitOutcome.PRESENT] * 2
    story.world.finish_work()
    story.world.check([chain("ab")])
    assert story.in_memory("ab") == 2


def test_blocks_can_follow_one_that_is_on_nvme_only(story: TieredStory) -> None:
    story.write_behind("ab")
    story.leave_memory()
    story.commit(chain("abc")[2:], story.reserve(1), parent=chain("ab")[1])
    assert story.matched("abc") == 3
    story.acquire_pending("abc")
    story.world.finish_work()
    story.world.check([chain("abc")])
    assert story.in_memory("abc") == 3


# ------------------------------------------------------------------------------------------- order


def test_the_largest_saving_is_read_first(one_at_a_time: TieredStory) -> None:
    story = one_at_a_time
    for path in ("a", "x", "mn"):
        story.write_behind(path)
    story.leave_memory()
    for path in ("a", "x", "mn"):
        story.acquire_pending(path)
    order = []
    while story.under_way:
        order.append(read_names(story))
        story.mover.finish(story.under_way[0])
    assert order == [["a"], ["m", "mn"], ["x"]]


def test_what_is_prefetched_is_read_after_what_somebody_waits_for(
    one_at_a_time: TieredStory,
) -> None:
    story = one_at_a_time
    for path in ("abcd", "xy"):
        story.write_behind(path)
    story.leave_memory()
    assert prefetch(story, "abcd").promoting_count == 4
    story.acquire_pending("xy")
    order = []
    while story.under_way:
        order.append(read_names(story))
        story.mover.finish(story.under_way[0])
    assert order == [["a", "ab"], ["x", "xy"], ["abc", "abcd"]]


def test_a_prefetched_block_that_somebody_waits_for_is_not_read_last(
    one_at_a_time: TieredStory,
) -> None:
    story = one_at_a_time
    for path in ("ab", "mno", "xy"):
        story.write_behind(path)
    story.leave_memory()
    story.acquire_pending("ab")
    prefetch(story, "mno")
    prefetch(story, "xy")
    story.acquire_pending("xy")
    order = []
    while story.under_way:
        order.append(read_names(story))
        story.mover.finish(story.under_way[0])
    assert order == [["a", "ab"], ["x", "xy"], ["m", "mn"], ["mno"]]


def test_prefetches_together_take_a_part_of_memory_only() -> None:
    nvme = replace(TIERED.lower[TierName.NVME], prefetch_fraction_max=0.25)
    story = TieredStory(replace(TIERED, lower={TierName.NVME: nvme}))
    story.write_behind("abcdef")
    story.write_behind("xy")
    story.leave_memory()
    assert prefetch(story, "abcdef") == ins.PrefetchBegun(0, 4)
    assert prefetch(story, "xy") == ins.PrefetchBegun(0, 0)
    story.world.finish_work()
    assert prefetch(story, "abcdef") == ins.PrefetchBegun(4, 2)


def test_a_prefetch_does_not_evict_what_it_continues(story: TieredStory) -> None:
    story.write_behind("abcd")
    story.leave_memory()
    prefetch(story, "ab")
    story.world.finish_work()
    story.world.now = 1.0
    story.offload("ghijklmnopqrst")  # Memory is full, and this was used last.
    story.world.finish_work()
    story.world.now = 2.0
    assert prefetch(story, "abcd").promoting_count == 2
    story.world.finish_work()
    assert story.in_memory("abcd") == 4


# ------------------------------------------------------------------------------------- bad endings


def test_a_block_that_is_corrupt_on_nvme_is_a_miss_and_so_is_what_follows(
    story: TieredStory,
) -> None:
    story.write_behind("abc")
    story.leave_memory()
    [slot] = [slot for slot, row in story.disk.rows.items() if row.block == chain("ab")[1]]
    story.disk.scribble(slot)
    pending = story.acquire_pending("abc")
    story.world.finish_work()
    granted = story.world.granted[pending.lease]
    assert (granted.leased_count, granted.cut) == (1, Cut.MISS)
    assert story.matched("abc") == 1
    assert story.free_count() == 15
    story.world.check([chain("abc")])


@pytest.mark.parametrize(
    ("outcome", "matched_count"), [(TransferOutcome.FAILED, 0), (TransferOutcome.REFUSED, 2)]
)
def test_a_block_that_was_not_read_is_a_miss_now(
    story: TieredStory, outcome: TransferOutcome, matched_count: int
) -> None:
    story.write_behind("ab")
    story.leave_memory()
    pending = story.acquire_pending("ab")
    story.mover.finish(story.under_way[0], outcome)
    granted = story.world.granted[pending.lease]
    assert (granted.lease, granted.cut) == (None, Cut.MISS)
    story.world.finish_turns()
    assert story.matched("ab") == matched_count
    assert story.free_count() == 16
    story.world.check([chain("ab")])


def test_a_corrupt_copy_of_a_block_in_memory_is_just_lost(story: TieredStory) -> None:
    story.write_behind("ab")
    story.leave_memory()
    story.acquire_pending("ab")
    [transfer] = story.under_way
    story.world.run(ev.WithdrawSlabSet(SlabSetId(1)))  # What is read goes nowhere now.
    story.world.finish_turns()
    story.mover.finish(transfer, TransferOutcome.CORRUPT)
    story.world.finish_work()
    assert story.matched("ab") == 0
    story.world.check([chain("ab")])


def test_a_block_that_is_lost_while_it_is_read_does_not_come_back_half(
    story: TieredStory,
) -> None:
    """The pool is called gone, and a read of it ends well after all: before the sweep."""
    story.write_behind("ab")
    story.leave_memory()
    story.acquire_pending("ab")
    assert story.world.nvme is not None
    story.world.nvme.worsen(readable=False)
    story.world.turn(0)
    story.mover.finish(story.under_way[0])
    story.world.finish_work()
    assert story.matched("ab") == 0
    story.world.check([chain("ab")])
    assert story.free_count() == 16


def test_the_parent_of_a_block_lost_while_it_is_read_can_be_evicted(story: TieredStory) -> None:
    """It counts its children in memory; one that never arrived must not be among them."""
    story.write_behind("ab")
    story.leave_memory()
    story.acquire_pending("a")
    story.world.finish_work()
    pending = story.acquire_pending("ab")
    [transfer] = story.under_way
    assert story.world.nvme is not None
    story.world.nvme.worsen(readable=False)
    story.world.turn(0)  # Both copies are gone, nothing is swept.
    story.mover.finish(transfer)
    story.world.run(ev.Release(story.session, (pending.lease, *story.world.granted)))
    story.world.finish_work()
    story.world.check([chain("ab")])
    story.leave_memory()
    assert story.in_memory("ab") == 0


def test_blocks_cleared_while_they_are_read_do_not_come_back(story: TieredStory) -> None:
    story.write_behind("ab")
    story.leave_memory()
    story.acquire_pending("ab")
    story.world.clear(NS)
    story.world.finish_turns()
    story.world.finish_work()
    assert story.matched("ab") == 0
    story.world.check([chain("ab")])
    story.world.now = 100.0
    story.tick(0.0)
    story.world.assert_all_free()


def test_what_is_read_into_a_withdrawn_set_stays_on_nvme(story: TieredStory) -> None:
    story.write_behind("ab")
    story.leave_memory()
    story.acquire_pending("ab")
    story.world.run(ev.WithdrawSlabSet(SlabSetId(1)))
    story.world.finish_work()
    assert (story.in_memory("ab"), story.on_nvme("ab"), story.matched("ab")) == (0, 2, 2)
    story.world.check([chain("ab")])


def test_a_doomed_block_in_a_withdrawn_set_is_voided_once(story: TieredStory) -> None:
    story.write_behind("ab")
    story.leave_memory()
    story.acquire_pending("ab")
    assert story.world.nvme is not None
    story.world.nvme.worsen(readable=False)
    story.world.turn(0)  # The blocks are lost; they are swept later …
    story.world.start(ev.WithdrawSlabSet(SlabSetId(1)))
    story.world.finish_work()  # … than their slots are.
    assert story.matched("ab") == 0
    story.world.check([chain("ab")])


def test_an_evicted_block_that_is_being_read_is_kept(story: TieredStory) -> None:
    story.write_behind("ab")
    story.leave_memory()
    prefetch(story, "ab")
    assert story.world.run(ev.Evict(NS, packed(chain("ab")))) == ins.Evicted(0, 2)
    story.world.finish_work()
    assert story.world.run(ev.Evict(NS, packed(chain("ab")))) == ins.Evicted(2, 0)
    assert not story.disk.rows
    story.world.check([chain("ab")])
