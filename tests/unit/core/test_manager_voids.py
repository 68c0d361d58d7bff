"""Clear, corruption, withdrawn slabs: gone at once, never leaked, never lent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.types import CommitOutcome, Cut, SlabSetId
from tests.support.fake_engine import FakeEngine
from tests.support.world import chain, packed, slots_of
from tests.unit.core.test_manager import CONFIG, NS, Story


@pytest.fixture
def story() -> Story:
    return Story()


def test_a_cleared_block_is_no_match_and_its_slot_is_free(story: Story) -> None:
    story.offload("abc")
    story.world.clear(NS)
    assert story.matched("abc") == 0
    story.world.finish_turns()
    assert story.free_count() == 16


def test_blocks_committed_after_a_clear_outlive_the_sweep_of_the_old_ones(story: Story) -> None:
    story.offload("abc")
    slots = story.reserve(2)
    story.world.clear(NS)
    fresh = story.world.manager.handle(ev.Reserve(story.session, NS, 2), 0.0)
    reply = next(one for one in fresh if isinstance(one, ins.SlotsReserved))
    story.world.start(story.commit_event(chain("ab"), reply.slots.tolist()))
    story.world.finish_turns()
    assert story.matched("abc") == 2
    assert story.commit(chain("ab")[:1], slots[:1]) == [CommitOutcome.PRESENT]
    story.world.check([chain("abc")])


def test_slots_reserved_before_a_clear_commit_void_whatever_epoch_is_named(story: Story) -> None:
    slots = story.reserve(2)
    story.world.clear(NS)
    story.world.finish_turns()
    assert story.commit(chain("ab"), slots) == [CommitOutcome.VOID] * 2
    assert (story.matched("ab"), story.free_count()) == (0, 16)


def test_a_commit_that_names_an_older_epoch_is_void(story: Story) -> None:
    event = story.commit_event(chain("a"), story.reserve(1))
    story.world.clear(NS)
    story.world.finish_turns()
    outcome = story.world.run(
        ev.Commit(event.session, NS, event.hashes, slots_of(story.reserve(1)), None, event.epoch)
    )
    assert isinstance(outcome, ins.Committed)
    assert outcome.outcomes[0] == CommitOutcome.VOID


def test_a_leased_slot_outlives_a_clear_until_the_lease_ends(story: Story) -> None:
    slots = story.offload("ab")
    granted = story.acquire("ab")
    story.world.clear(NS)
    story.world.finish_turns()
    assert not set(story.reserve(16)) & set(slots)
    story.world.run(ev.Release(story.session, (granted.lease,)))
    assert set(story.reserve(16)) == set(slots)


def test_a_clear_between_two_slices_of_an_acquire_is_a_miss(story: Story) -> None:
    story.offload("abcd")
    granted: list[object] = []
    story.world.start(ev.Acquire(story.session, NS, packed(chain("abcd")), 9.0), granted.append)
    story.world.clear(NS)
    story.world.finish_turns()
    assert isinstance(granted[0], ins.LeaseGranted)
    assert granted[0].lease is None
    story.world.check([chain("abcd")])


def test_a_corrupt_block_takes_what_depends_on_it_along(story: Story) -> None:
    slots = story.offload("abcd")
    story.offload("xy")
    story.world.start(ev.SlotsCorrupt(NS, slots_of(slots[1:2])))
    assert story.matched("abcd") == 1
    story.world.finish_turns()
    assert (story.matched("abcd"), story.matched("xy")) == (1, 2)
    assert story.free_count() == 16 - 3


def test_a_block_that_came_back_survives_what_is_still_said_of_its_old_slot(story: Story) -> None:
    slots = story.offload("ab")
    story.acquire("ab")  # Whoever still says something of a slot holds it.
    story.world.start(ev.SlotsCorrupt(NS, slots_of(slots[1:])))
    story.world.start(story.commit_event(chain("ab")[1:], story.reserve_now(1), chain("a")[0]))
    story.world.start(ev.SlotsCorrupt(NS, slots_of(slots[1:])))
    assert story.matched("ab") == 2
    story.world.finish_turns()
    assert story.matched("ab") == 2
    story.world.check([chain("ab")])


def test_corrupt_blocks_are_reported_removed_once(story: Story) -> None:
    slots = story.offload("abcd")
    story.world.run(ev.SlotsCorrupt(NS, slots_of([slots[2], slots[1]])))
    assert story.world.removed_count == 3


def test_other_blocks_are_evicted_while_void_ones_wait_to_be_swept(story: Story) -> None:
    slots = story.offload("abcdefgh")
    story.offload("stuvwxyz")
    story.world.start(ev.SlotsCorrupt(NS, slots_of(slots[:1])))
    assert story.world.run(ev.Evict(NS, chain("stuvwxyz"))) == ins.Evicted(8, 0)


def test_a_withdrawn_set_is_dropped_when_nobody_maps_or_holds_it(story: Story) -> None:
    story.offload("ab")
    granted = story.acquire("ab")
    story.world.run(ev.WithdrawSlabSet(SlabSetId(1)))
    assert (story.matched("ab"), story.acquire("ab").cut) == (0, Cut.MISS)
    story.world.now = 100.0
    story.read_mail(story.engine)
    assert SlabSetId(1) in story.world.sets  # The lease holds it.
    story.world.run(ev.Release(story.session, (granted.lease,)))
    story.tick(0.0)
    assert SlabSetId(1) not in story.world.sets


def test_a_withdrawn_set_waits_for_whoever_was_offered_it_and_may_map_it(story: Story) -> None:
    late = FakeEngine(story.world, 2, shard_count=1, together=True)  # Has unread offers.
    story.world.run(ev.WithdrawSlabSet(SlabSetId(1)))
    story.read_mail(story.engine)
    story.tick(1.0)
    assert SlabSetId(1) in story.world.sets
    story.read_mail(late)  # Maps it, is told to unmap it, does so.
    story.tick(1.0)
    assert SlabSetId(1) not in story.world.sets


def test_a_withdrawn_set_is_dropped_after_its_engine_has_reconnected(story: Story) -> None:
    process = story.engine.scheduler
    story.engine.lose(process)
    story.world.run(ev.WithdrawSlabSet(SlabSetId(1)))
    story.engine.connect(process)
    story.engine.declare_own_quiet(process)
    story.tick(1.0)
    assert SlabSetId(1) not in story.world.sets


def test_a_slab_that_was_not_offered_cannot_be_claimed(story: Story) -> None:
    stranger = FakeEngine(story.world, 2, shard_count=1, together=False)
    scheduler = stranger.scheduler.session
    assert scheduler is not None
    story.world.run(ev.SlabMapped(scheduler, story.world.sets[SlabSetId(1)].slabs[0]))
    outcome = story.world.run(ev.Reserve(scheduler, NS, 1))
    assert isinstance(outcome, ins.SlotsReserved)
    assert len(outcome.slots) == 0


def test_slots_of_a_withdrawn_set_are_recalled_and_commit_void(story: Story) -> None:
    slots = story.reserve(2)
    story.world.run(ev.WithdrawSlabSet(SlabSetId(1)))
    asked = story.world.mail[story.session]
    assert ins.RecallSlots(story.session, NS, 16) in asked
    assert story.commit(chain("ab"), slots) == [CommitOutcome.VOID] * 2


def test_a_namespace_without_slabs_takes_one_from_who_has_two() -> None:
    rich = Story(replace(CONFIG, slab_count_max=2), slab_count=2)
    rich.reserve(17)  # Does not fit: grows.
    rich.read_mail(rich.engine)
    assert len(rich.world.sets) == 2
    poor = type(NS)(2)
    rich.world.open_namespace(poor, slot_bytes=4096)
    engine = rich.new_engine(2)
    rich.read_mail(rich.engine)
    rich.tick(1.0)
    rich.read_mail(engine)
    owners = sorted(one.namespace for one in rich.world.sets.values())
    assert owners == [NS, poor]
