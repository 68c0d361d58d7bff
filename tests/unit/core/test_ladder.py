"""Two tiers below memory: which one a block is read from, and what the loss of one leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.events import TransferOutcome
from kvtier.core.settings import LowerSettings, ManagerConfig
from kvtier.types import Cut, TierName
from tests.support.fake_disk import FakeDisk
from tests.support.fake_mover import Transfer
from tests.support.lower_shell import LowerShell
from tests.support.world import chain, packed, slots_of
from tests.unit.core.test_demotions import TIERED, TieredStory, names
from tests.unit.core.test_manager import NS, SLOT_BYTES

CXL, NVME, DRAM = TierName.CXL, TierName.NVME, TierName.DRAM
BOTH = (CXL, NVME)
TWO_RUNGS = replace(
    TIERED,
    lower={
        CXL: LowerSettings(
            write_bytes_per_hour=1e9,
            transfer_bytes_max=8 * SLOT_BYTES,
            batch_blocks=4,
            prefetch_fraction_max=0.5,
        ),
        **TIERED.lower,
    },
)


class LadderStory(TieredStory):
    """A story with a CXL pool above the NVMe pool."""

    def __init__(
        self,
        config: ManagerConfig = TWO_RUNGS,
        *,
        cxl_count: int = 8,
        nvme_count: int = 8,
        is_direct: bool = False,
    ) -> None:
        super().__init__(config, segment_count=nvme_count)
        self.disks = {CXL: FakeDisk(4 * SLOT_BYTES, cxl_count, row_count_max=4), NVME: self.disk}
        self.disks[CXL].is_direct = is_direct
        self.world.open_lower(CXL, self.disks[CXL])

    @property
    def cxl(self) -> LowerShell:
        return self.world.lower[CXL]

    def stored(self, tier: TierName) -> list[str]:
        """The blocks that lie there, by the slot table."""
        return sorted(names([row.block for row in self.disks[tier].rows.values()]))

    def write_down(self, path: str, *, cxl: str = "", nvme: str = "") -> None:
        """Offload this chain; of its blocks those that end so go down to each tier."""
        self.offload(path)
        for tier, wanted in zip(BOTH, (cxl, nvme), strict=True):
            mover = self.world.lower[tier].mover
            while mover.under_way:
                one = mover.under_way[0]
                for member, slot in enumerate(one.asked.slots.tolist()):
                    name = names([self.world.namespaces[NS].ready_at[slot]])[0]
                    if name[-1] in wanted:
                        mover.move(one, member)
                    else:
                        one.outcomes[member] = TransferOutcome.FAILED
                mover.finish(one)
        self.leave_memory()
        self.world.check([chain(path)])

    def read_from(self, tier: TierName) -> list[str]:
        """Blocks being read from there now."""
        return [
            names([self.disks[tier].rows[slot].block])[0]
            for one in self.reads(tier)
            for slot in one.asked.lower_slots.tolist()
        ]

    def reads(self, tier: TierName) -> list[Transfer]:
        return [one for one in self.world.lower[tier].mover.under_way if not one.is_demotion]

    def match(self, path: str) -> dict[TierName, int]:
        return dict(self.world.match(NS, chain(path)).tiers)

    def granted(self, path: str) -> ins.LeaseGranted:
        """A lease on all of it that can come; the bytes are looked at."""
        pending = self.acquire_pending(path)
        self.world.finish_work()
        granted = self.world.granted[pending.lease]
        for slot, block in zip(granted.slots.tolist(), chain(path), strict=False):
            assert self.world.is_right(slot, 0, block)
        self.world.check([chain(path)])
        return granted

    def slot_in(self, tier: TierName, name: str) -> int:
        rows = self.disks[tier].rows
        [slot] = [slot for slot, row in rows.items() if names([row.block]) == [name]]
        return slot


@pytest.fixture
def story() -> LadderStory:
    return LadderStory()


# --------------------------------------------------------------------------------------------- down


def test_a_block_goes_down_to_both_tiers(story: LadderStory) -> None:
    story.write_behind("ab")
    assert story.stored(CXL) == story.stored(NVME) == ["a", "ab"]


def test_a_block_is_pinned_until_both_tiers_have_it(story: LadderStory) -> None:
    story.offload("ab")
    [to_cxl], [to_nvme] = (story.world.lower[tier].mover.under_way for tier in BOTH)
    assert to_cxl.asked.slots.tolist() == to_nvme.asked.slots.tolist()
    story.cxl.mover.finish(to_cxl)
    story.leave_memory()
    assert story.in_memory("ab") == 2
    story.mover.finish(to_nvme)
    story.leave_memory()
    assert story.in_memory("ab") == 0


def test_a_block_that_one_tier_did_not_take_is_in_the_other(story: LadderStory) -> None:
    story.write_down("abc", cxl="a", nvme="abc")
    assert (story.stored(CXL), story.stored(NVME)) == (["a"], ["a", "ab", "abc"])
    assert story.matched("abc") == 3


def test_a_block_read_from_the_slower_tier_goes_to_the_faster_one_as_well(
    story: LadderStory,
) -> None:
    """The faster one would else hold only what was new once."""
    story.write_down("ab", nvme="ab")
    granted = story.granted("ab")
    assert granted.lease is not None
    story.world.finish_work()
    assert story.stored(CXL) == ["a", "ab"]


def test_a_chain_that_pauses_goes_down_to_both_tiers(story: LadderStory) -> None:
    story.offload("ab")
    for tier in BOTH:
        mover = story.world.lower[tier].mover
        mover.finish(mover.under_way[0], TransferOutcome.FAILED)
    assert story.world.run(ev.HintPaused(NS, packed(chain("ab")))) == ins.HintUsed(True)
    story.world.finish_work()
    assert story.stored(CXL) == story.stored(NVME) == ["a", "ab"]


def test_bytes_spoiled_in_memory_go_to_neither_tier_and_are_voided_once(
    story: LadderStory,
) -> None:
    slots = story.offload("abc")
    story.world.scribble(slots[1])
    story.world.finish_work()
    assert story.matched("abc") == 1
    assert story.stored(CXL) == story.stored(NVME) == ["a"]
    story.world.check([chain("abc")])


@pytest.mark.parametrize("by", ["a write to the disk", "a read by value"])
def test_a_block_found_corrupt_in_memory_takes_its_copy_along_that_nobody_compared(
    by: str,
) -> None:
    cxl = replace(TWO_RUNGS.lower[CXL], is_compared=False)
    story = LadderStory(replace(TWO_RUNGS, lower={**TWO_RUNGS.lower, CXL: cxl}))
    slots = story.offload("abc")
    story.cxl.mover.finish_all()
    assert story.stored(CXL) == ["a", "ab", "abc"]
    if by == "a write to the disk":
        story.world.scribble(slots[1])
    else:
        story.mover.finish_all()
        story.world.run(ev.SlotsCorrupt(NS, slots_of(slots[1:2])))
    story.world.finish_work()
    is_on_disk = by != "a write to the disk"
    assert story.matched("abc") == (3 if is_on_disk else 1)
    assert story.stored(CXL) == (["a", "abc"] if is_on_disk else ["a"])
    story.world.check([chain("abc")])


def test_each_tier_has_a_budget_of_its_own() -> None:
    cxl = replace(TWO_RUNGS.lower[CXL], write_bytes_per_hour=0.0)
    story = LadderStory(replace(TWO_RUNGS, lower={**TWO_RUNGS.lower, CXL: cxl}), cxl_count=1)
    story.write_behind("abcd")  # What fills the empty pool is free.
    story.world.run(ev.Evict(NS, packed(chain("abcd"))))
    story.write_behind("xy")
    assert (story.stored(CXL), story.stored(NVME)) == ([], ["x", "xy"])


# ----------------------------------------------------------------------------------------------- up


def test_a_block_in_both_tiers_is_read_from_the_faster_one(story: LadderStory) -> None:
    story.write_down("ab", cxl="ab", nvme="ab")
    pending = story.acquire_pending("ab")
    assert (story.read_from(CXL), story.read_from(NVME)) == (["a", "ab"], [])
    story.world.finish_work()
    assert story.world.granted[pending.lease].tiers == ((CXL, 2),)
    assert story.stored(CXL) == story.stored(NVME) == ["a", "ab"]


def test_a_chain_that_lies_in_several_tiers_comes_up_in_one_lease(story: LadderStory) -> None:
    story.write_down("abcde", cxl="abc", nvme="de")
    released = story.granted("a")
    assert released.lease is not None
    story.world.run(ev.Release(story.session, (released.lease,)))
    assert story.match("abcde") == {DRAM: 1, CXL: 2, NVME: 2}
    pending = story.acquire_pending("abcde")
    assert (story.read_from(CXL), story.read_from(NVME)) == (["ab", "abc"], ["abcd", "abcde"])
    story.world.finish_work()
    granted = story.world.granted[pending.lease]
    assert granted.tiers == ((DRAM, 1), (CXL, 2), (NVME, 2))
    assert granted.leased_count == 5
    for slot, block in zip(granted.slots.tolist(), chain("abcde"), strict=True):
        assert story.world.is_right(slot, 0, block)


def test_a_match_tells_which_tier_each_block_would_come_from(story: LadderStory) -> None:
    story.write_down("abcd", cxl="ab", nvme="abcd")
    assert story.match("abcd") == {CXL: 2, NVME: 2}
    story.cxl.worsen(readable=True)
    assert story.match("abcd") == {CXL: 2, NVME: 2}
    story.world.start(ev.LowerChanged(readable=False, tier=CXL))
    assert story.match("abcd") == {NVME: 4}  # Though nothing has been given up yet.


def test_the_slower_tier_is_read_while_the_faster_one_is_busy() -> None:
    """Each has limits of its own."""
    cxl = replace(TWO_RUNGS.lower[CXL], transfer_bytes_max=SLOT_BYTES, batch_blocks=1)
    story = LadderStory(replace(TWO_RUNGS, lower={**TWO_RUNGS.lower, CXL: cxl}))
    story.write_down("abcd", cxl="abc", nvme="d")
    story.acquire_pending("abcd")
    assert (story.read_from(CXL), story.read_from(NVME)) == (["a"], ["abcd"])
    story.world.finish_work()
    assert story.in_memory("abcd") == 4


def test_a_prefetch_reads_from_both_tiers(story: LadderStory) -> None:
    story.write_down("abcd", cxl="ab", nvme="cd")
    begun = story.world.run(ev.Prefetch(NS, packed(chain("abcd"))))
    assert begun == ins.PrefetchBegun(memory_count=0, promoting_count=4)
    assert (story.read_from(CXL), story.read_from(NVME)) == (["a", "ab"], ["abc", "abcd"])
    story.world.finish_work()
    assert story.in_memory("abcd") == 4


def test_what_nobody_waits_for_any_more_is_read_from_neither_tier() -> None:
    one_at_a_time = {
        tier: replace(its, transfer_bytes_max=SLOT_BYTES) for tier, its in TWO_RUNGS.lower.items()
    }
    story = LadderStory(replace(TWO_RUNGS, lower=one_at_a_time))
    story.write_down("abcd", cxl="ab", nvme="cd")
    story.write_down("mnop", cxl="mn", nvme="op")
    story.acquire_pending("abcd")
    pending = story.acquire_pending("mnop")
    assert story.free_count() == 8
    story.world.run(ev.Release(story.session, (pending.lease,)))
    assert story.free_count() == 12
    story.world.check([chain("abcd"), chain("mnop")])
    story.world.finish_work()
    assert (story.in_memory("abcd"), story.in_memory("mnop")) == (4, 0)


# ---------------------------------------------------------------------------------------- bad ends


@pytest.mark.parametrize("outcome", [TransferOutcome.CORRUPT, TransferOutcome.FAILED])
def test_a_block_that_the_faster_tier_has_lost_comes_from_the_slower_one(
    story: LadderStory, outcome: TransferOutcome
) -> None:
    story.write_down("abc", cxl="abc", nvme="abc")
    pending = story.acquire_pending("abc")
    read = story.reads(CXL)[0]
    story.cxl.mover.move(read, 0)
    story.cxl.mover.finish(read, outcome)  # Of a and ab.
    story.world.finish_work()
    granted = story.world.granted[pending.lease]
    assert (granted.leased_count, granted.cut) == (1, Cut.MISS)
    assert story.stored(CXL) == ["a", "abc"]
    assert story.matched("abc") == 3
    assert granted.lease is not None
    story.world.run(ev.Release(story.session, (granted.lease,)))
    assert story.granted("abc").tiers == ((DRAM, 2), (NVME, 1))


def test_bits_that_flip_in_the_faster_tier_cost_one_miss(story: LadderStory) -> None:
    story.write_down("ab", cxl="ab", nvme="ab")
    story.disks[CXL].scribble(story.slot_in(CXL, "a"))
    assert story.granted("ab").lease is None
    story.leave_memory()
    granted = story.granted("ab")
    assert (granted.leased_count, granted.tiers) == (2, ((CXL, 1), (NVME, 1)))


def test_a_tier_that_is_gone_takes_no_block_along_that_another_has(story: LadderStory) -> None:
    story.write_down("abcd", cxl="abcd", nvme="ab")
    story.cxl.worsen(readable=False)
    story.world.finish_work()
    assert (story.stored(CXL), story.stored(NVME)) == ([], ["a", "ab"])
    assert story.match("abcd") == {NVME: 2}
    granted = story.granted("abcd")
    assert (granted.leased_count, granted.cut, granted.tiers) == (2, Cut.MISS, ((NVME, 2),))


def test_a_slower_tier_that_is_gone_takes_what_follows_along(story: LadderStory) -> None:
    """A block that the faster tier has is of no use without those before it."""
    story.write_down("abcd", cxl="abd", nvme="abcd")
    assert story.world.nvme is not None
    story.world.nvme.worsen(readable=False)
    story.world.finish_work()
    assert (story.stored(CXL), story.stored(NVME)) == (["a", "ab"], [])
    assert story.match("abcd") == {CXL: 2}
    story.world.check([chain("abcd")])


def test_a_block_being_read_from_a_tier_that_is_gone_stays_in_the_other(
    story: LadderStory,
) -> None:
    story.write_down("ab", cxl="ab", nvme="ab")
    story.acquire_pending("ab")
    [read] = story.reads(CXL)
    story.cxl.worsen(readable=False)
    story.world.finish_turns()
    story.cxl.mover.finish(read, TransferOutcome.FAILED)
    story.world.finish_work()
    assert story.match("ab") == {NVME: 2}
    assert story.granted("ab").tiers == ((NVME, 2),)


def test_a_block_that_only_the_lost_tier_has_is_no_lack_of_room(story: LadderStory) -> None:
    """Before it is given up, and though the other tier can be read."""
    story.write_down("ab", cxl="ab", nvme="a")
    story.world.start(ev.LowerChanged(readable=False, tier=CXL))
    outcomes: list[object] = []
    acquire = ev.Acquire(story.session, NS, packed(chain("ab")), 10.0, wait_until=5.0)
    story.world.start(acquire, outcomes.append)
    story.world.finish_work()
    granted = outcomes[-1]
    assert isinstance(granted, ins.LeaseGranted)
    assert (granted.leased_count, granted.cut) == (1, Cut.MISS)


def test_cleared_blocks_come_back_from_neither_tier(story: LadderStory) -> None:
    story.write_down("abcd", cxl="ab", nvme="abcd")
    story.acquire_pending("abcd")
    assert story.reads(CXL)
    assert story.reads(NVME)
    story.world.clear(NS)
    story.world.finish_work()
    assert story.matched("abcd") == 0
    assert [one.block_count for one in story.world.manager.stats().lower.values()] == [0, 0]
    story.world.now = 100.0
    story.tick(0.0)
    story.world.assert_all_free()


def test_an_evicted_chain_leaves_every_tier(story: LadderStory) -> None:
    story.write_down("abcd", cxl="abc", nvme="abd")
    story.granted("a")
    story.world.run(ev.Release(story.session, tuple(story.world.granted)))
    assert story.world.run(ev.Evict(NS, packed(chain("abcd")))) == ins.Evicted(4, 0)
    assert story.stored(CXL) == story.stored(NVME) == []
    story.world.check([chain("abcd")])
    story.world.assert_all_free()


# ----------------------------------------------------------------------------------------- retiring


def fill_cxl(story: LadderStory) -> None:
    """Two of three segments are full, in this order: nothing more fits."""
    story.write_behind("abcd")
    story.write_behind("efgh")


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_segment_of_the_faster_tier_keeps_hot_blocks(in_memory: bool) -> None:
    """Those that are not in memory are promoted from that segment, though NVMe has them too."""
    story = LadderStory(cxl_count=3)
    fill_cxl(story)
    story.use("ab")
    if not in_memory:
        story.leave_memory()
    story.write_behind("wx")
    assert story.stored(CXL) == ["a", "ab", "e", "ef", "efg", "efgh", "w", "wx"]
    assert story.matched("abcd") == 4  # What it has given up is on NVMe.
    counts = story.world.manager.stats().lower
    assert [counts[tier].reused_segment_count for tier in BOTH] == [1, 0]
    assert [counts[tier].reinserted_count for tier in BOTH] == [2, 0]
    assert [counts[tier].dropped_count for tier in BOTH] == [2, 0]
    story.world.check([chain("abcd")])


def test_a_segment_does_not_wait_for_a_block_that_does_not_come_from_another_tier() -> None:
    """Somebody has its hot blocks read from CXL when the NVMe segment begins to retire."""
    story = LadderStory(nvme_count=3)
    story.write_behind("abcd")
    story.write_behind("efgh")
    story.use("ab")
    story.leave_memory()
    story.acquire_pending("ab")
    story.offload("wxyz")
    [read] = story.reads(CXL)
    assert not story.reads(NVME)
    story.cxl.mover.finish(read, TransferOutcome.REFUSED)
    story.world.finish_work()
    assert "wxyz" in story.stored(NVME)
    assert "a" not in story.stored(NVME)
    assert story.matched("ab") == 2
    story.world.check([chain("abcd")])


def test_a_block_read_from_the_faster_tier_goes_again_in_the_slower_one() -> None:
    story = LadderStory(nvme_count=3)
    story.write_behind("abcd")
    story.write_behind("efgh")
    story.use("ab")
    story.leave_memory()
    story.acquire_pending("ab")
    story.offload("wx")
    story.world.finish_work()
    assert story.stored(NVME)[:2] == ["a", "ab"]
    assert story.world.manager.stats().lower[NVME].reinserted_count == 2


# ------------------------------------------------------------------------------- counts, restarts


def test_each_tier_is_counted_by_itself(story: LadderStory) -> None:
    story.write_down("abcd", cxl="ab", nvme="abcd")
    story.offload("xy")
    story.acquire_pending("a")
    lower = story.world.manager.stats().lower
    assert tuple(lower) == BOTH
    assert [lower[tier].block_count for tier in BOTH] == [2, 4]
    assert [lower[tier].demoting_count for tier in BOTH] == [2, 2]
    assert [lower[tier].promoting_count for tier in BOTH] == [1, 0]
    assert [lower[tier].written_bytes for tier in BOTH] == [2 * SLOT_BYTES, 4 * SLOT_BYTES]


@pytest.mark.parametrize("order", [BOTH, BOTH[::-1]])
def test_what_both_tiers_held_is_taken_in_from_both(
    story: LadderStory, order: tuple[TierName, ...]
) -> None:
    story.write_down("abcd", cxl="abc", nvme="abcd")
    for disk in story.disks.values():
        disk.write_table()
        disk.sync()
    story.world.restart(lambda page: True)
    story.world.open_namespace(NS, slot_bytes=SLOT_BYTES)
    for tier in order:
        story.world.open_lower(tier, story.disks[tier])
    story.world.finish_turns()
    assert story.match("abcd") == {CXL: 3, NVME: 1}
    assert [one.block_count for one in story.world.manager.stats().lower.values()] == [3, 4]
    story.world.check([chain("abcd")])


def test_a_tier_that_forgets_everything_leaves_what_the_other_keeps(story: LadderStory) -> None:
    story.disks[CXL].is_volatile = True
    story.write_down("abcd", cxl="abcd", nvme="ab")
    for disk in story.disks.values():
        disk.write_table()
        disk.sync()
    story.world.restart(lambda page: True)
    story.world.open_namespace(NS, slot_bytes=SLOT_BYTES)
    for tier in BOTH:
        story.world.open_lower(tier, story.disks[tier])
    story.world.finish_turns()
    assert story.match("abcd") == {NVME: 2}
    story.world.check([chain("abcd")])


def test_slots_by_last_use_are_told_for_each_tier(story: LadderStory) -> None:
    story.write_down("ab", cxl="ab", nvme="ab")
    story.world.now = 1.0
    story.write_down("xy", cxl="x", nvme="xy")
    manager = story.world.manager
    expected = {CXL: ["a", "ab", "x"], NVME: ["a", "ab", "x", "xy"]}
    for tier in BOTH:
        slots = manager.recency(tier).tolist()
        assert names([story.disks[tier].rows[slot].block for slot in slots]) == expected[tier]
