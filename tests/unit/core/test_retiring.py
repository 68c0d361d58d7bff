"""The segment that is reused next: what of it goes again, and who has to wait for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.erasing_events import HoldRemains, RemainsErased
from kvtier.core.events import TransferOutcome
from kvtier.core.manager import BlockManager
from kvtier.policy.lru import LruPolicy
from kvtier.types import NamespaceId, TierName
from tests.support.fake_engine import FakeEngine
from tests.support.world import HASH_BYTES, chain, packed
from tests.unit.core.test_demotions import TIERED, TieredStory, names
from tests.unit.core.test_manager import NS, SLOT_BYTES

OTHER = NamespaceId(2)


@pytest.fixture
def story() -> TieredStory:
    """Three segments of four slots; one is kept free for blocks that go again."""
    return TieredStory(segment_count=3)


def fill(story: TieredStory) -> None:
    """Two segments are full, in this order: nothing more fits."""
    story.write_behind("abcd")
    story.write_behind("efgh")


def on_nvme(story: TieredStory) -> list[str]:
    return sorted(names([row.block for row in story.disk.rows.values()]))


def write_behind_other(story: TieredStory, engine: FakeEngine, path: str) -> None:
    """As `write_behind`, for the other namespace."""
    engine.reserve(OTHER, len(path))
    story.read_mail(engine)
    engine.reserve(OTHER, len(path))
    engine.offload(OTHER, chain(path))
    for copy in list(engine.copies):
        engine.run_copy(copy)
    engine.commit(engine.offloads[0])
    story.world.finish_work()


# ------------------------------------------------------------------------------------ going again


def test_the_oldest_segment_is_reused_when_there_is_no_other(story: TieredStory) -> None:
    fill(story)
    story.write_behind("wxyz")
    assert on_nvme(story) == ["e", "ef", "efg", "efgh", "w", "wx", "wxy", "wxyz"]
    assert story.matched("abcd") == 4  # In memory they still are.
    assert story.counts.reused_segment_count == 1


def test_a_block_used_since_it_was_written_goes_again_once(story: TieredStory) -> None:
    fill(story)
    story.use("ab")
    story.write_behind("wxyz")
    assert on_nvme(story)[:2] == ["a", "ab"]
    assert story.counts.reinserted_count == 2
    story.write_behind("st")  # The segment of efgh is reused,
    story.write_behind("mnop")  # then that of a and ab, which nobody has used again.
    story.write_behind("MNOP")
    assert "a" not in on_nvme(story)
    assert story.counts.reinserted_count == 2
    story.world.check([chain("abcd")])


def test_at_most_half_of_a_segment_goes_again(story: TieredStory) -> None:
    fill(story)
    story.use("abcd")
    story.write_behind("wxyz")
    assert on_nvme(story)[:2] == ["a", "ab"]
    assert story.counts.reinserted_count == 2


def test_a_used_block_that_is_on_nvme_only_is_promoted_to_go_again(story: TieredStory) -> None:
    fill(story)
    story.use("ab")
    story.leave_memory()
    story.write_behind("wx")
    assert on_nvme(story)[:2] == ["a", "ab"]
    assert (story.matched("abcd"), story.matched("efgh")) == (2, 4)
    story.world.check([chain("abcd")])


def test_a_block_that_somebody_else_is_having_promoted_has_one_slot_in_memory() -> None:
    """Blocks that go again are promoted two at a time; the others are asked for meanwhile."""
    story = TieredStory(segment_count=3, segment_slots=8)
    story.write_behind("abcdefgh")
    story.write_behind("ijklmnop")
    story.use("abcd")
    story.leave_memory()
    story.offload("wx")
    [again] = [one for one in story.under_way if not one.is_demotion]
    assert len(again.asked.slots) == 2
    pending = story.acquire_waiting("abcd", skip=2)
    story.world.finish_work()
    story.world.check([chain("abcd")])
    assert isinstance(pending, ins.LeasePending)
    assert story.world.granted[pending.lease].leased_count == 4
    assert on_nvme(story)[:4] == ["a", "ab", "abc", "abcd"]
    assert story.counts.reinserted_count == 4


def test_a_block_that_leaves_memory_and_is_back_goes_again_once() -> None:
    """While the disk is too slow to take it: it would be written to two slots."""
    nvme = replace(TIERED.lower[TierName.NVME], batch_blocks=3, transfer_blocks_max=1)
    config = replace(TIERED, lower={TierName.NVME: nvme})
    story = TieredStory(config, segment_count=3, segment_slots=8)
    story.write_behind("abcdefgh")
    story.write_behind("IJKLMNOP")
    story.use("abcd")
    story.world.run(ev.Evict(NS, packed(chain("IJKLMNOP")[6:])))
    story.offload("wx")
    [first] = story.under_way  # The blocks a, ab and abc are being written, abcd waits …
    assert len(first.asked.slots) == 3
    story.leave_memory()  # … and leaves memory.
    story.acquire_pending("abcd")
    [read] = [one for one in story.under_way if one is not first]
    story.mover.finish(read)
    story.world.finish_work()
    story.world.check([chain("abcd")])
    assert on_nvme(story).count("abcd") == 1
    assert story.counts.reinserted_count == 4


def test_blocks_for_which_there_is_no_slot_are_forgotten_and_may_go_down_later() -> None:
    """Of two segments none is kept free for blocks that go again."""
    story = TieredStory(segment_count=2)
    fill(story)
    story.use("ab")
    story.write_behind("wxyz")
    assert on_nvme(story)[0] == "e"
    story.world.check([chain("abcd")])  # Nothing is called DEMOTING any more.
    story.use("ab")
    story.tick(0.0)
    story.world.finish_work()
    assert on_nvme(story)[:2] == ["a", "ab"]


# --------------------------------------------------------------------------------- who has to wait


def test_a_segment_that_is_being_read_is_passed_over(story: TieredStory) -> None:
    fill(story)
    story.leave_memory()
    story.acquire_pending("a")
    story.offload("wxyz")
    for transfer in [one for one in story.under_way if one.is_demotion]:
        story.mover.finish(transfer)
    story.world.finish_turns()
    assert "a" in on_nvme(story)
    assert "e" not in on_nvme(story)
    story.world.finish_work()
    story.world.check([chain("abcd")])


def test_a_segment_waits_for_blocks_that_go_again_but_not_for_ever(story: TieredStory) -> None:
    fill(story)
    story.use("ab")
    story.leave_memory()
    story.offload("wxyz")
    story.world.finish_turns()
    assert "abcd" in on_nvme(story)
    assert any(not one.is_demotion for one in story.under_way)  # They are being read.
    story.tick(10.1)
    for transfer in [one for one in story.under_way if one.is_demotion]:
        story.mover.finish(transfer)
    story.tick(0.1)
    assert "abcd" not in on_nvme(story)
    story.world.finish_work()
    story.world.check([chain("abcd")])


def test_a_segment_does_not_wait_for_a_block_that_could_not_be_read(story: TieredStory) -> None:
    fill(story)
    story.use("ab")
    story.leave_memory()
    story.offload("wxyz")
    [again] = [one for one in story.under_way if not one.is_demotion]
    story.mover.finish(again, TransferOutcome.REFUSED)
    story.world.finish_work()
    assert "wxyz" in on_nvme(story)
    assert "a" not in on_nvme(story)
    story.world.check([chain("abcd")])


def test_others_are_reused_while_a_read_hangs(story: TieredStory) -> None:
    """It began after its segment had begun to retire."""
    fill(story)
    story.use("ab")
    story.leave_memory()
    story.offload("wxyz")
    story.world.finish_turns()
    [again] = [one for one in story.under_way if not one.is_demotion]
    story.acquire_pending("abc", wait=1.0)
    [hanging] = [one for one in story.under_way if not one.is_demotion and one is not again]
    story.mover.finish(again)

    def end_others() -> None:
        story.world.finish_turns()
        for transfer in list(story.under_way):
            if transfer is not hanging:
                story.mover.finish(transfer)
                story.world.finish_turns()

    end_others()
    assert on_nvme(story)[:3] == ["a", "ab", "abc"]  # The last one cannot be forgotten.
    assert "wxyz" not in on_nvme(story)
    story.tick(10.1)
    end_others()
    story.offload("stuv")  # Not worth wxyz is the segment of its own beginning, the only other one.
    end_others()
    assert "stuv" in on_nvme(story)
    story.world.finish_work()
    story.world.check([chain("abcd")])


def test_blocks_that_were_to_go_again_and_are_evicted_keep_nobody_waiting() -> None:
    nvme = replace(TIERED.lower[TierName.NVME], batch_blocks=1, transfer_blocks_max=1)
    story = TieredStory(replace(TIERED, lower={TierName.NVME: nvme}), segment_count=3)
    fill(story)
    story.use("ab")
    story.offload("wxyz")
    assert [names(list(one.sources[0])) for one in story.under_way] == [["a"]]
    assert story.world.run(ev.Evict(NS, packed(chain("abcd")))) == ins.Evicted(3, 1)
    story.world.finish_work()
    assert {"a", "w", "wx", "wxy", "wxyz"} <= set(on_nvme(story))
    story.world.check([chain("abcd")])


def test_no_segment_is_emptied_for_a_pool_that_takes_no_more_writes(story: TieredStory) -> None:
    fill(story)
    story.use("ab")
    story.leave_memory()
    story.offload("wxyz")
    story.world.finish_turns()
    assert story.world.nvme is not None
    story.world.nvme.worsen(readable=True)
    for transfer in list(story.under_way):
        refused = TransferOutcome.REFUSED if transfer.is_demotion else TransferOutcome.DONE
        story.mover.finish(transfer, refused)
    story.tick(100.0)
    story.world.run(ev.SweepVoid())
    story.world.finish_work()
    assert {"a", "ab", "abc", "abcd"} <= set(on_nvme(story))


# --------------------------------------------------------------------------------- other namespaces


def test_nothing_more_is_written_to_a_segment_that_retires() -> None:
    """It is half full, and its namespace would go on to fill it: with what goes again."""
    story = TieredStory(replace(TIERED, slab_count_max=2), segment_count=3, slab_count=2)
    story.write_behind("ab")
    story.use("ab")
    story.world.open_namespace(OTHER, slot_bytes=SLOT_BYTES)
    engine = story.new_engine(2)
    write_behind_other(story, engine, "ABCD")
    write_behind_other(story, engine, "Z")
    assert {"a", "ab"} <= set(on_nvme(story))
    assert story.counts.reinserted_count == 2
    story.world.check([chain("ab"), chain("ABCD")])


def test_segments_of_a_namespace_that_nobody_has_opened_are_reused(story: TieredStory) -> None:
    fill(story)
    story.disk.write_table()
    story.disk.sync()
    story.world.restart(lambda page: True)
    story.world.open_namespace(OTHER, slot_bytes=SLOT_BYTES)
    story.world.populate_slab()
    story.world.open_nvme(story.disk)
    write_behind_other(story, story.new_engine(2), "ABCDEFGHIJKL")
    assert "a" not in on_nvme(story)
    assert story.world.namespaces[OTHER].on_nvme
    # Opened at last: what has been reused is not there, and what follows it neither.
    story.world.open_namespace(NS, slot_bytes=SLOT_BYTES)
    story.world.finish_turns()
    story.world.check([chain("abcd"), chain("efgh")])
    assert story.matched("abcd") == 0


def test_recovered_blocks_are_not_taken_in_once_their_segment_has_a_new_life(
    story: TieredStory,
) -> None:
    """The same slots hold blocks again, of the same namespace, but others."""
    story.write_behind("abcd")
    old = sorted(story.disk.rows)
    lives = np.array([story.disk.headers[slot // 4].sequence for slot in old], dtype=np.uint64)
    epoch = story.world.namespaces[NS].epoch
    stale = ev.BlocksRecovered(
        NS,
        epoch,
        b"".join(chain("qrst")),
        np.array([-1, 0, 1, 2], dtype=np.int32),
        np.array(old, dtype=np.uint32),
        lives - np.uint64(1),
    )
    story.world.manager.handle(stale, 0.0)
    assert story.matched("qrst") == 0
    assert story.matched("abcd") == 4
    story.world.check([chain("abcd")])


def test_recovered_blocks_that_never_were_in_memory_can_be_lost(story: TieredStory) -> None:
    fill(story)
    story.disk.write_table()
    story.disk.sync()
    story.world.restart(lambda page: True)
    story.world.open_namespace(NS, slot_bytes=SLOT_BYTES)
    shell = story.world.open_nvme(story.disk)
    story.world.finish_turns()
    assert story.matched("abcd") == 4
    shell.worsen(readable=False)
    story.world.finish_turns()
    assert story.matched("abcd") == 0
    story.world.check([chain("abcd")])


def test_blocks_cleared_before_the_pool_was_told_of_do_not_come_back(story: TieredStory) -> None:
    fill(story)
    story.disk.write_table()
    story.disk.sync()
    epoch = story.world.namespaces[NS].epoch
    lives, [found] = story.disk.recover({story.world.namespaces[NS].fingerprint: epoch})
    manager = BlockManager(TIERED, make_policy=LruPolicy)
    record = story.world.namespaces[NS]
    manager.handle(
        ev.NamespaceOpened(
            NS,
            epoch,
            HASH_BYTES,
            SLOT_BYTES,
            1,
            shard_bytes=SLOT_BYTES,
            fingerprint=record.fingerprint,
        ),
        0.0,
    )
    manager.handle(ev.Clear(NS, epoch + 1), 0.0)
    disk = story.disk
    manager.handle(
        ev.LowerOpened(disk.segment_bytes, 3, disk.row_count_max, 1, 1 << 40, lives=lives), 0.0
    )
    recovered = ev.BlocksRecovered(
        NS, epoch, b"".join(found.hashes), found.parents, found.slots, found.sequences
    )
    told = manager.handle(recovered, 0.0)
    assert [type(one) for one in told] == [ins.WriteLowerGone]
    assert manager.match_packed(NS, b"".join(chain("abcd"))).matched_count == 0
    counts = manager.stats().nvme
    assert counts is not None
    assert counts.block_count == 0
    assert manager.check_invariants() == []


# ------------------------------------------------------------------------- chains that do not fit


def short_story() -> TieredStory:
    """Of three segments a purge holds one, and one is kept free: the third is all there is."""
    story = TieredStory(segment_count=3)
    held = story.world.run(HoldRemains(TierName.NVME, 2))
    assert isinstance(held, ins.RemainsHeld)
    return story


def on_nvme_of(story: TieredStory, path: str) -> int:
    """Leading blocks of the chain that have a copy; there are no others of it."""
    count = story.on_nvme(path)
    assert story.on_nvme(path[:count]) == count, "not the beginning"
    return count


def test_a_chain_that_does_not_fit_is_written_as_far_as_it_does() -> None:
    story = short_story()
    story.write_behind("abcdefghi")
    assert on_nvme_of(story, "abcdefghi") == 4
    story.use("abcdefghi")
    story.tick(0.1)
    story.world.finish_work()
    assert on_nvme_of(story, "abcdefghi") == 4
    assert story.counts.written_bytes // SLOT_BYTES == 4


def test_another_chain_is_worth_the_segment() -> None:
    story = short_story()
    story.write_behind("abcdefghi")
    story.write_behind("wx")
    assert on_nvme(story) == ["w", "wx"]


def test_what_was_given_up_goes_down_when_it_is_asked_for_again() -> None:
    story = short_story()
    story.write_behind("abcdefgh")
    story.world.run_quietly(RemainsErased(TierName.NVME, 2))
    story.world.finish_work()
    assert on_nvme_of(story, "abcdefgh") == 4
    story.use("abcdefgh")
    story.tick(0.1)
    story.world.finish_work()
    assert on_nvme_of(story, "abcdefgh") == 8


def test_a_block_that_follows_what_was_given_up_brings_it_along() -> None:
    story = short_story()
    story.write_behind("abcdef")
    story.world.run_quietly(RemainsErased(TierName.NVME, 2))
    story.write_behind("abcdefg")
    assert on_nvme_of(story, "abcdefg") == 7


def test_the_segment_with_the_parent_is_passed_over() -> None:
    story = TieredStory(segment_count=2)
    fill(story)
    story.write_behind("abcdk")
    assert on_nvme(story) == ["a", "ab", "abc", "abcd", "abcdk"]
    assert story.counts.written_bytes // SLOT_BYTES == 9


def test_who_waits_for_a_segment_that_is_erased_gets_it_without_another_call() -> None:
    """Both are held; what waits has its parent nowhere."""
    story = TieredStory(segment_count=2)
    for segment in (0, 1):
        assert isinstance(story.world.run(HoldRemains(TierName.NVME, segment)), ins.RemainsHeld)
    story.write_behind("ab")
    assert on_nvme(story) == []
    story.world.run_quietly(RemainsErased(TierName.NVME, 0))
    story.world.finish_work()
    assert on_nvme(story) == ["a", "ab"]


def test_a_chain_that_does_not_fit_keeps_others_waiting_no_longer() -> None:
    """Its last block asks for all of them at once, and stands before the others."""
    story = short_story()
    story.write_behind("abcdefghi")
    story.write_behind("wx")
    story.write_behind("abcdefghij")
    assert on_nvme(story) == ["a", "ab", "w", "wx"]
    story.write_behind("stuv")
    assert on_nvme(story) == ["s", "st", "stu", "stuv"]
