"""Leases on what lies in a tier below memory: who is granted them, and what they hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import DAEMON_SESSION
from kvtier.types import Cut
from tests.support.fake_engine import FakeEngine
from tests.support.world import chain, packed
from tests.unit.core.test_ladder import CXL, DRAM, NVME, TWO_RUNGS, LadderStory
from tests.unit.core.test_manager import NS

HELD_SEGMENTS = 4  # Half of the pool.


class DirectStory(LadderStory):
    """A story whose engine has mapped the CXL pool."""

    def __init__(self, *, cxl_count: int = 8) -> None:
        super().__init__(replace(TWO_RUNGS, slab_count_max=1), cxl_count=cxl_count, is_direct=True)
        self.map_all(self.engine)

    def map_all(self, engine: FakeEngine) -> None:
        for process in engine.processes:
            engine.map_segments(process, self.disks[CXL].segment_count)

    def lease(self, path: str, *, seconds: float = 10.0) -> tuple[ins.LeaseGranted, str]:
        """A lease by who does not wait; 'd' for each block that lies below, 'm' for one in
        memory."""
        granted = self.acquire(path, seconds=seconds)
        below = granted.is_direct
        where = "m" * len(granted.slots) if below is None else _letters(below.tolist())
        for one, slot, block in zip(where, granted.slots.tolist(), chain(path), strict=False):
            if one == "d":
                assert set(self.disks[CXL].read(slot)) == {block}
            else:
                assert self.world.is_right(slot, 0, block)
        self.world.check([chain(path)])
        return granted, where

    def release(self, granted: ins.LeaseGranted) -> None:
        assert granted.lease is not None
        self.world.run(ev.Release(self.session, (granted.lease,)))
        self.world.run(ev.Tick())

    def pins(self) -> int:
        return sum(shell.counts.leased_count for shell in self.world.lower.values())

    def used_segments(self, granted: ins.LeaseGranted) -> set[int]:
        assert granted.is_direct is not None
        slots = granted.slots[granted.is_direct].tolist()
        return {slot // self.disks[CXL].row_count_max for slot in slots}

    def fill_pool(self) -> None:
        """Others use every segment of the pool that may be reused."""
        for first in "pqrstuvwxyz":
            self.write_behind(first + "bcd")
            self.world.run(ev.Tick())
            self.world.finish_work()


def _letters(below: list[bool]) -> str:
    return "".join("d" if one else "m" for one in below)


@pytest.fixture
def story() -> DirectStory:
    return DirectStory()


# ------------------------------------------------------------------------------------ who gets them


def test_who_does_not_wait_is_leased_what_lies_below(story: DirectStory) -> None:
    story.write_down("abcd", cxl="abcd")
    granted, where = story.lease("abcd")
    assert (where, granted.cut, granted.tiers) == ("dddd", Cut.NONE, ((CXL, 4),))
    assert story.pins() == 4
    assert not story.reads(CXL), "nothing is copied up"


def test_one_lease_is_on_blocks_in_memory_and_below(story: DirectStory) -> None:
    story.write_down("abcd", cxl="abcd")
    story.world.run(ev.Prefetch(NS, packed(chain("ab"))))
    story.world.finish_work()
    granted, where = story.lease("abcd")
    assert (where, granted.cut, dict(granted.tiers)) == ("mmdd", Cut.NONE, {DRAM: 2, CXL: 2})
    assert story.pins() == 2


def test_nobody_is_before_all_processes_of_the_engine_have_mapped_it(story: DirectStory) -> None:
    story.write_down("abcd", cxl="abcd")
    other = FakeEngine(story.world, 2, shard_count=1, together=False)
    story.read_mail(other)
    outcome = _acquire(story, other)
    assert (outcome.lease, outcome.cut) == (None, Cut.DEADLINE)
    story.map_all(other)
    assert _acquire(story, other).leased_count == 4
    assert _acquire(story, other, takes_direct=False).lease is None, "an older client"


def test_a_process_that_connects_anew_must_map_it_anew(story: DirectStory) -> None:
    story.write_down("abcd", cxl="abcd")
    [process] = story.engine.processes
    story.engine.break_unseen(process)
    story.read_mail(story.engine)
    assert story.acquire("abcd").lease is None
    story.map_all(story.engine)
    assert story.acquire("abcd").leased_count == 4


def test_only_segments_that_were_mapped_are_leased(story: DirectStory) -> None:
    [process] = story.engine.processes
    story.engine.break_unseen(process)
    story.read_mail(story.engine)
    story.engine.map_segments(process, 1)
    story.write_down("abcdef", cxl="abcdef")
    granted, where = story.lease("abcdef")
    assert (where, granted.cut) == ("dddd", Cut.DEADLINE)


def test_blocks_only_on_nvme_are_promoted_within_the_same_lease(story: DirectStory) -> None:
    story.write_down("abcd", cxl="ab", nvme="abcd")
    outcome = story.acquire_pending("abcd")
    assert outcome.memory_count == 2, "those that need not come"
    story.world.finish_work()
    granted = story.world.granted[outcome.lease]
    assert granted.is_direct is not None
    assert granted.is_direct.tolist() == [True, True, False, False]
    assert dict(granted.tiers) == {CXL: 2, NVME: 2}


def test_the_daemon_itself_is_leased_nothing_below(story: DirectStory) -> None:
    story.write_down("ab", cxl="ab")
    deadline = story.world.now + 10
    outcome = story.world.run(ev.Acquire(DAEMON_SESSION, NS, packed(chain("ab")), deadline))
    assert isinstance(outcome, ins.LeaseGranted)
    assert outcome.lease is None


# ----------------------------------------------------------------------------------- what they hold


def test_leases_hold_at_most_half_of_the_segments(story: DirectStory) -> None:
    path = "abcdefghijklmnopqrstuvwx"  # Six segments of eight.
    for end in range(8, len(path) + 1, 8):
        _offload_more(story, path, end)
        story.world.finish_work()
        story.leave_memory()
    granted, where = story.lease(path)
    assert len(story.used_segments(granted)) == HELD_SEGMENTS
    assert (set(where), granted.cut) == ({"d"}, Cut.DEADLINE)


def test_a_leased_segment_is_not_reused_and_an_unleased_one_is(story: DirectStory) -> None:
    story.write_down("abcd", cxl="abcd")
    granted, _ = story.lease("abcd", seconds=60.0)
    sequences = {one: _life(story, one) for one in story.used_segments(granted)}
    story.fill_pool()
    assert sequences == {one: _life(story, one) for one in sequences}
    for slot, block in zip(granted.slots.tolist(), chain("abcd"), strict=True):
        assert set(story.disks[CXL].read(slot)) == {block}
    story.release(granted)
    assert story.pins() == 0
    story.fill_pool()
    assert all(_life(story, one) > before for one, before in sequences.items())


@pytest.mark.parametrize("ends", ["clear", "evict"])
def test_bytes_stay_under_a_lease_whose_blocks_have_gone(story: DirectStory, ends: str) -> None:
    story.write_down("abcd", cxl="abcd")
    granted, _ = story.lease("abcd", seconds=60.0)
    if ends == "clear":
        story.world.clear(NS)
        story.world.finish_turns()
    else:
        story.world.run(ev.Evict(NS, packed(chain("abcd"))))
    assert story.matched("abcd") == 0
    story.fill_pool()
    for slot, block in zip(granted.slots.tolist(), chain("abcd"), strict=True):
        assert set(story.disks[CXL].read(slot)) == {block}
    story.release(granted)
    story.world.check([])


def test_a_lease_holds_until_its_deadline_and_the_margin(story: DirectStory) -> None:
    story.write_down("abcd", cxl="abcd")
    story.lease("abcd", seconds=10.0)
    story.tick(10.0 + story.world.config.lease_margin_seconds - 0.1)
    assert story.pins() == 4
    story.tick(0.2)
    assert story.pins() == 0


def test_leases_of_an_engine_that_is_dead_hold_nothing(story: DirectStory) -> None:
    story.write_down("abcd", cxl="abcd")
    story.lease("abcd", seconds=60.0)
    story.engine.die(story.engine.scheduler)
    story.world.run(ev.Tick())
    assert story.pins() == 0


# -------------------------------------------------------------------------------------- second uses


def test_a_block_is_promoted_when_it_is_leased_below_for_the_second_time(
    story: DirectStory,
) -> None:
    story.write_down("abcd", cxl="abcd")
    first, _ = story.lease("abcd")
    assert not story.reads(CXL)
    second, where = story.lease("ab")
    assert where == "dd"
    assert story.read_from(CXL) == ["a", "ab"]
    third, where = story.lease("abcd")
    assert where == "dddd", "nobody waits for what is under way"
    story.world.finish_work()
    for one in (first, second, third):
        story.release(one)
    assert story.match("abcd")[DRAM] >= 2


def _acquire(
    story: DirectStory, engine: FakeEngine, *, takes_direct: bool = True
) -> ins.LeaseGranted:
    assert engine.scheduler.session is not None
    deadline = story.world.now + 10
    outcome = story.world.run(
        ev.Acquire(
            engine.scheduler.session,
            NS,
            packed(chain("abcd")),
            deadline,
            takes_direct=takes_direct,
        )
    )
    assert isinstance(outcome, ins.LeaseGranted)
    return outcome


def _offload_more(story: DirectStory, path: str, end: int) -> None:
    hashes = chain(path[:end])
    parent = hashes[end - 9] if end > 8 else None
    story.commit(hashes[end - 8 :], story.reserve(8), parent=parent)


def _life(story: DirectStory, segment: int) -> int:
    return story.disks[CXL].headers[segment].sequence
