"""Adopting what a former life left in memory, on directed stories; random ones are in model/."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.core import adoption
from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.types import NamespaceId
from tests.support.adopting import hold_seconds, restart
from tests.support.world import chain, slots_of
from tests.unit.core.test_manager import CONFIG, NS, Story

SLOT_COUNT = 16


class AdoptedStory(Story):
    """An engine has offloaded `path`; then the daemon is killed, and the next one adopts."""

    def __init__(self, path: str) -> None:
        super().__init__(CONFIG)
        self.slots = self.offload(path) if path else []

    def kill(self, *, unreadable: tuple[int, ...] = ()) -> None:
        restart(self.world, [self.engine], lambda slot: slot in unreadable)
        self.world.finish_turns()

    def connect(self) -> None:
        self.engine.connect(self.engine.scheduler)
        self.read_mail(self.engine)

    def free(self) -> int:
        (counts,) = self.world.manager.stats().namespaces
        return counts.free_count

    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.run(ev.Tick())


def test_what_was_ready_is_hit_by_an_engine_that_comes_back() -> None:
    story = AdoptedStory("abc")
    story.kill()
    assert story.matched("abc") == 3
    story.connect()
    granted = story.acquire("abc")
    assert granted.slots.tolist() == story.slots


def test_nothing_adopted_is_evicted_while_a_lease_of_the_former_life_may_run() -> None:
    story = AdoptedStory("abc")
    story.kill()
    story.connect()
    assert len(story.reserve(SLOT_COUNT)) == SLOT_COUNT - 3
    story.pass_time(hold_seconds(story.world) - 0.5)
    assert story.reserve(1) == []
    assert story.matched("abc") == 3
    story.pass_time(0.5)
    assert len(story.reserve(3)) == 3
    assert story.matched("abc") == 0


def test_a_lease_of_the_former_life_is_released_without_ending_one_of_this() -> None:
    story = AdoptedStory("abc")
    old = story.acquire("abc").lease
    story.kill()
    story.connect()
    new = story.acquire("abc").lease
    assert old is not None
    assert new is not None
    assert old != new
    story.world.run(ev.Release(story.session, (old,)))
    assert story.world.manager.stats().lease_count == 1


def test_slots_being_filled_come_back_when_their_engine_is_quiet() -> None:
    story = AdoptedStory("a")
    reserved = story.reserve(4)
    story.kill()
    story.connect()
    story.pass_time(hold_seconds(story.world))
    assert story.free() == SLOT_COUNT - 1 - len(reserved)
    story.engine.declare_own_quiet(story.engine.scheduler)
    assert story.free() == SLOT_COUNT - 1


def test_slots_being_filled_come_back_when_their_engine_is_dead_and_its_dma_over() -> None:
    story = AdoptedStory("a")
    story.reserve(4)
    story.kill()
    story.engine.die(story.engine.scheduler)
    assert story.free() == SLOT_COUNT - 1 - 4
    story.pass_time(story.world.config.grace_seconds)
    assert story.free() == SLOT_COUNT - 1


def test_a_slot_whose_entry_cannot_be_read_is_held_like_a_leased_one() -> None:
    story = AdoptedStory("abc")
    story.kill(unreadable=(story.slots[1],))
    assert story.matched("abc") == 1  # What no chain reaches is no block any more.
    assert story.free() == SLOT_COUNT - 3
    story.pass_time(hold_seconds(story.world))
    assert story.free() == SLOT_COUNT - 1


def test_blocks_of_an_epoch_before_a_clear_are_not_believed() -> None:
    story = AdoptedStory("abc")
    stale = story.world.namespaces[NS].epoch
    story.world.clear(NS)
    story.world.finish_turns()
    story.kill(unreadable=tuple(story.slots))
    event = ev.BlocksAdopted(
        NamespaceId(NS),
        stale,
        b"".join(chain("abc")),
        np.array([-1, 0, 1], dtype=np.int32),
        slots_of(story.slots),
        np.ones(3, dtype=np.bool_),
        sequence_next=100,
    )
    assert story.world.manager.handle(event, story.world.now) == []
    assert story.matched("abc") == 0


def test_a_block_that_was_not_summed_is_summed_again() -> None:
    story = AdoptedStory("ab")
    story.world.checksum_at.clear()
    story.kill()
    (asked,) = story.world.checksums
    assert isinstance(asked, ins.ComputeChecksums)
    assert asked.slots.tolist() == story.slots
    story.world.compute_checksums(0)
    story.world.check([chain("ab")])


def test_a_slab_is_not_dropped_while_a_process_of_the_former_life_may_map_it() -> None:
    story = AdoptedStory("a")
    story.kill()
    (slab_set,) = story.world.sets
    story.world.run(ev.WithdrawSlabSet(slab_set))
    story.pass_time(hold_seconds(story.world))
    story.world.finish_work()
    assert list(story.world.sets) == [slab_set]
    story.engine.die(story.engine.scheduler)
    story.pass_time(story.world.config.grace_seconds)
    story.world.finish_work()
    assert slab_set not in story.world.sets


def test_a_set_that_was_free_may_be_given_up_before_the_holds_end() -> None:
    story = AdoptedStory("")
    assert len(story.world.sets) == 1
    story.kill()
    story.engine.die(story.engine.scheduler)
    story.pass_time(story.world.config.grace_seconds)
    (slab_set,) = story.world.sets
    story.world.run(ev.WithdrawSlabSet(slab_set))
    story.world.finish_work()
    assert slab_set not in story.world.sets
    story.pass_time(hold_seconds(story.world))
    assert story.world.manager.check_invariants() == []


def test_no_block_is_taken_in_to_a_set_that_is_withdrawn_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adoption, "ADOPTED_SLICE_BLOCKS", 1)
    story = AdoptedStory("a")
    for path in "xyz":
        story.offload(path)
    restart(story.world, [story.engine])
    (slab_set,) = story.world.sets
    story.world.start(ev.WithdrawSlabSet(slab_set))
    story.world.finish_turns()
    assert [story.matched(path) for path in "axyz"] == [0, 0, 0, 0]
    story.engine.die(story.engine.scheduler)
    story.pass_time(hold_seconds(story.world))
    story.world.finish_work()
    assert slab_set not in story.world.sets


def test_blocks_that_are_read_after_the_last_lease_has_ended_are_hits_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adoption, "ADOPTED_SLICE_BLOCKS", 1)
    story = AdoptedStory("abc")
    restart(story.world, [story.engine])
    unread = list(story.world.turns)
    story.world.turns.clear()
    story.pass_time(hold_seconds(story.world) + 1)
    story.world.turns += unread
    story.world.finish_turns()
    assert story.matched("abc") == 3
    story.pass_time(0)
    story.connect()
    assert len(story.reserve(SLOT_COUNT)) == SLOT_COUNT
