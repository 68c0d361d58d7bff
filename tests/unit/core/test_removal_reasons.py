"""Whatever leaves a tier says why: `kvtier explain` has nothing else to go by."""

from __future__ import annotations

import pytest

from kvtier.core import events as ev
from kvtier.core.events import TransferOutcome
from kvtier.types import BlockHash, RemovedFor, TierName
from tests.support.world import chain, packed, slots_of
from tests.unit.core.test_demotions import TieredStory
from tests.unit.core.test_manager import NS

DRAM, NVME = TierName.DRAM, TierName.NVME


@pytest.fixture
def story() -> TieredStory:
    return TieredStory()


def told(story: TieredStory, tier: TierName, reason: RemovedFor) -> set[BlockHash]:
    """The blocks that left this tier for this reason."""
    return {
        block
        for one in story.world.removals
        if (one.tier, one.reason) == (tier, reason)
        for block in one.hashes
    }


def reasons(story: TieredStory) -> set[tuple[TierName, RemovedFor]]:
    return {(one.tier, one.reason) for one in story.world.removals}


def test_blocks_leave_memory_because_room_was_needed(story: TieredStory) -> None:
    story.write_behind("ab")
    story.leave_memory()
    assert told(story, DRAM, RemovedFor.ROOM) == set(chain("ab"))
    assert reasons(story) == {(DRAM, RemovedFor.ROOM)}, "what stays on NVMe has not left it"


def test_an_administrators_eviction_is_one_in_every_tier(story: TieredStory) -> None:
    story.write_behind("ab")
    story.world.run(ev.Evict(NS, packed(chain("ab"))))
    story.world.finish_turns()
    assert told(story, DRAM, RemovedFor.EVICT) == told(story, NVME, RemovedFor.EVICT)
    assert reasons(story) == {(DRAM, RemovedFor.EVICT), (NVME, RemovedFor.EVICT)}


def test_a_reused_segment_is_what_its_blocks_went_for() -> None:
    story = TieredStory(segment_count=2)
    for first in "abcdefgh":
        story.write_behind(first + "xyz")
        story.tick(1.0)
        story.world.finish_work()
        story.leave_memory()
    gone = told(story, NVME, RemovedFor.SEGMENT)
    assert chain("axyz")[0] in gone
    assert {one for one in reasons(story) if one[0] is NVME} == {(NVME, RemovedFor.SEGMENT)}


def test_a_corrupt_block_goes_for_that_and_the_others_for_their_parent(story: TieredStory) -> None:
    slots = story.offload("abc")
    story.world.run(ev.SlotsCorrupt(NS, slots_of(slots[:1])))
    story.world.finish_work()
    assert told(story, DRAM, RemovedFor.CORRUPT) == set(chain("a"))
    assert told(story, DRAM, RemovedFor.PARENT) == set(chain("abc")[1:])


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (TransferOutcome.CORRUPT, RemovedFor.CORRUPT),
        (TransferOutcome.FAILED, RemovedFor.READ_FAILED),
    ],
)
def test_what_a_read_brought_is_what_a_block_on_nvme_went_for(
    story: TieredStory, outcome: TransferOutcome, reason: RemovedFor
) -> None:
    story.write_behind("ab")
    story.leave_memory()
    story.acquire_pending("ab")
    story.mover.finish(story.under_way[0], outcome)
    story.world.finish_work()
    assert told(story, NVME, reason) == set(chain("ab"))


def test_a_tier_that_is_gone_takes_its_blocks_along(story: TieredStory) -> None:
    story.write_behind("ab")
    story.leave_memory()
    story.world.run(ev.LowerChanged(readable=False))
    story.world.finish_work()
    assert told(story, NVME, RemovedFor.TIER_OFF) == set(chain("ab"))


def test_a_withdrawn_slab_is_what_its_blocks_went_for(story: TieredStory) -> None:
    story.offload("ab")
    [slab_set] = story.world.sets
    story.world.run(ev.WithdrawSlabSet(slab_set))
    story.world.finish_turns()
    assert told(story, DRAM, RemovedFor.SLAB) == set(chain("ab"))
