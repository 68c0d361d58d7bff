"""Write-behind: what goes down, in which order, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.events import TransferOutcome
from kvtier.core.manager import BlockManager
from kvtier.core.settings import LowerSettings, ManagerConfig
from kvtier.core.stats import LowerCounts
from kvtier.core.write_budget import WriteBudget
from kvtier.policy.eviction import Rows
from kvtier.policy.lru import LruPolicy
from kvtier.types import BlockHash, NamespaceId, TierName
from tests.support.fake_disk import FakeDisk
from tests.support.fake_mover import FakeMover, Transfer
from tests.support.world import chain, packed, slots_of
from tests.unit.core.test_manager import CONFIG, NS, SLOT_BYTES, Story

TIERED = replace(
    CONFIG,
    leases_per_session_max=8,
    lower={
        TierName.NVME: LowerSettings(
            write_bytes_per_hour=1e9,
            transfer_bytes_max=8 * SLOT_BYTES,
            batch_blocks=4,
            prefetch_fraction_max=0.5,
        )
    },
)


def with_budget(slots_per_hour: float, settings: Mapping[str, Any] = {}) -> ManagerConfig:
    budget_bytes = slots_per_hour * SLOT_BYTES
    nvme = replace(TIERED.lower[TierName.NVME], write_bytes_per_hour=budget_bytes, **settings)
    return replace(TIERED, lower={TierName.NVME: nvme})


class TieredStory(Story):
    """A story with an NVMe pool of a few small segments."""

    def __init__(
        self,
        config: ManagerConfig = TIERED,
        *,
        segment_count: int = 8,
        segment_slots: int = 4,
        slab_count: int = 1,
        make_manager: Callable[[ManagerConfig], BlockManager] | None = None,
    ) -> None:
        super().__init__(config, slab_count=slab_count, make_manager=make_manager)
        self.disk = FakeDisk(segment_slots * SLOT_BYTES, segment_count, row_count_max=segment_slots)
        self.world.open_nvme(self.disk)

    @property
    def mover(self) -> FakeMover:
        assert self.world.nvme is not None
        return self.world.nvme.mover

    @property
    def under_way(self) -> list[Transfer]:
        return self.mover.under_way

    def write_behind(self, path: str) -> None:
        """Offload this, and let it go down."""
        self.offload(path)
        self.world.finish_work()
        self.world.check([chain(path)])

    def leave_memory(self) -> None:
        """Somebody needs every slot."""
        slots = self.reserve(16)
        self.world.run(ev.Abort(self.session, NS, slots_of(slots)))

    def on_nvme(self, path: str) -> int:
        """How many blocks of this chain have a copy there."""
        return len(self.world.namespaces[NS].on_nvme.intersection(chain(path)))

    def in_memory(self, path: str) -> int:
        return len(self.world.namespaces[NS].in_memory.intersection(chain(path)))

    def acquire_waiting(
        self, path: str, *, wait: float = 5.0, seconds: float = 10.0, skip: int = 0
    ) -> ins.LeasePending | ins.LeaseGranted:
        now = self.world.now
        outcome = self.world.run(
            ev.Acquire(
                self.session,
                NS,
                packed(chain(path)),
                now + seconds,
                skip_count=skip,
                wait_until=now + wait,
                takes_direct=True,
            )
        )
        assert isinstance(outcome, ins.LeasePending | ins.LeaseGranted), outcome
        return outcome

    def acquire_pending(self, path: str, *, wait: float = 5.0) -> ins.LeasePending:
        pending = self.acquire_waiting(path, wait=wait)
        assert isinstance(pending, ins.LeasePending), pending
        return pending

    def use(self, path: str) -> None:
        """Acquire and release it."""
        granted = self.acquire(path)
        assert granted.lease is not None
        self.world.run(ev.Release(self.session, (granted.lease,)))

    @property
    def counts(self) -> LowerCounts:
        counts = self.world.manager.stats().nvme
        assert counts is not None
        return counts


@pytest.fixture
def story() -> TieredStory:
    return TieredStory()


def names(hashes: list[BlockHash]) -> list[str]:
    return [block.decode().lstrip(".") for block in hashes]


# ------------------------------------------------------------------------------------ order, copies


def test_evicting_a_copied_block_writes_nothing_and_keeps_it_resident(story: TieredStory) -> None:
    story.write_behind("abcd")
    assert (story.on_nvme("abcd"), story.disk.written_count) == (4, 4)
    story.leave_memory()
    assert (story.in_memory("abcd"), story.matched("abcd")) == (0, 4)
    assert story.disk.written_count == 4


def test_blocks_go_down_head_first(story: TieredStory) -> None:
    story.write_behind("abcdefgh")
    rows = sorted(story.disk.rows.values(), key=lambda row: row.sequence)
    assert names([row.block for row in rows]) == ["abcdefgh"[:end] for end in range(1, 9)]


def test_a_block_brings_the_parents_along_that_have_no_copy(story: TieredStory) -> None:
    story.offload("ab")
    story.mover.finish(story.under_way[0], TransferOutcome.FAILED)
    story.commit(chain("abc")[2:], story.reserve(1), parent=chain("ab")[1])
    story.world.finish_work()
    rows = sorted(story.disk.rows.values(), key=lambda row: row.sequence)
    assert names([row.block for row in rows]) == ["a", "ab", "abc"]


def test_a_block_without_checksum_does_not_go_down(story: TieredStory) -> None:
    slots = story.reserve(2)
    story.world.run(story.commit_event(chain("ab"), slots))
    story.tick(1.0)
    assert not story.under_way
    story.world.compute_checksums(0)
    assert story.under_way


def test_a_block_under_way_is_demoted_once(story: TieredStory) -> None:
    story.offload("ab")
    [transfer] = story.under_way
    story.use("ab")
    story.use("ab")
    story.world.run(ev.HintPaused(NS, packed(chain("ab"))))
    assert story.under_way == [transfer]
    story.world.finish_work()
    assert story.disk.written_count == 2


def test_a_block_under_way_is_not_evicted(story: TieredStory) -> None:
    story.offload("ab")
    story.leave_memory()
    assert story.in_memory("ab") == 2
    story.world.finish_work()
    story.leave_memory()
    assert story.in_memory("ab") == 0


def test_what_is_under_way_is_bounded_in_bytes_and_in_blocks() -> None:
    story = TieredStory()
    story.offload("abcdefghijklmnop")
    assert sum(len(one.asked.slots) for one in story.under_way) == 8
    nvme = replace(TIERED.lower[TierName.NVME], transfer_blocks_max=5, batch_blocks=2)
    few = replace(TIERED, lower={TierName.NVME: nvme})
    story = TieredStory(few)
    story.offload("abcdefghijklmnop")
    assert sum(len(one.asked.slots) for one in story.under_way) == 6
    story.world.finish_work()
    assert story.on_nvme("abcdefghijklmnop") == 16


def test_a_block_larger_than_a_segment_stays_in_memory() -> None:
    large = NamespaceId(2)
    story = TieredStory(replace(TIERED, slab_count_max=2), segment_slots=4, slab_count=2)
    story.world.open_namespace(large, slot_bytes=5 * SLOT_BYTES)
    engine = story.new_engine(2)
    engine.reserve(large, 1)
    story.read_mail(engine)
    engine.reserve(large, 1)
    engine.offload(large, chain("a"))
    engine.run_copy(engine.copies[0])
    engine.commit(engine.offloads[0])
    story.world.finish_work()
    assert story.world.namespaces[large].in_memory == set(chain("a"))
    assert not story.disk.rows


# ------------------------------------------------------------------------------------------ budget


def test_there_is_spare_budget_above_half_of_an_hours_share_only() -> None:
    budget = WriteBudget(bytes_per_hour=3600)
    budget.tell(0.0)
    budget.take(1799)
    assert budget.has_spare()
    budget.take(1)
    assert (budget.has_spare(), budget.may_write()) == (False, True)
    budget.take(1800)
    assert not budget.may_write()
    budget.tell(1801.0)
    assert budget.has_spare()


def test_no_more_than_an_hours_share_is_saved_up() -> None:
    budget = WriteBudget(bytes_per_hour=3600)
    budget.tell(0.0)
    budget.tell(1e6)
    assert budget.left_bytes == 3600


def test_what_fills_the_empty_pool_is_free() -> None:
    budget = WriteBudget(bytes_per_hour=100)
    budget.fill(1000)
    budget.take(900)
    assert budget.has_spare()
    budget.take(150)
    assert budget.left_bytes == 50


def test_blocks_used_twice_go_down_when_there_is_nothing_to_spare() -> None:
    """Eight slots are free to fill; of sixteen an hour eight are to spare."""
    story = TieredStory(with_budget(16), segment_count=2)
    story.write_behind("abcdefgh")
    story.write_behind("ABCDEFGH")
    story.world.run(ev.Evict(NS, packed(chain("abcdefgh"))))
    story.write_behind("xyz")
    assert story.on_nvme("xyz") == 0
    story.use("xyz")  # Committed, and used once more.
    story.tick(0.0)
    story.world.finish_work()
    assert story.on_nvme("xyz") == 3


def test_a_chain_that_pauses_goes_down_when_there_is_nothing_to_spare() -> None:
    story = TieredStory(with_budget(16), segment_count=2)
    story.write_behind("abcdefgh")
    story.write_behind("ABCDEFGH")
    story.world.run(ev.Evict(NS, packed(chain("abcdefgh"))))
    story.write_behind("xyz")
    assert story.world.run(ev.HintPaused(NS, packed(chain("xyz")))) == ins.HintUsed(True)
    story.world.finish_work()
    assert story.on_nvme("xyz") == 3


class Oracle(LruPolicy):
    """Says of every block how likely it is used again, and keeps how far ahead it was asked."""

    def __init__(self, likely: float) -> None:
        super().__init__()
        self.likely, self.seconds_asked = likely, 0.0

    def reuse_probabilities(self, rows: Rows, seconds: float) -> np.ndarray:
        self.seconds_asked = seconds
        return np.full(len(rows), self.likely)


POOL_SLOTS = 32
# Of the remote tier.
REMOTE = {"is_spare_written": False, "is_filling_free": False, "forecast_seconds_min": 7200.0}
tiers = pytest.mark.parametrize("settings", [{}, REMOTE], ids=["NVMe", "remote"])


def forecasting(
    likely: float, spent_share: float, settings: Mapping[str, Any] = {}
) -> tuple[TieredStory, Oracle]:
    """Of 100 blocks an hour so many were written already; writing is not free any more."""
    oracle = Oracle(likely)
    story = TieredStory(
        with_budget(100, settings),
        make_manager=lambda config: BlockManager(config, make_policy=lambda _: oracle),
    )
    budget = story.world.manager._ladder.rungs[TierName.NVME].demotions.budget
    if not settings:
        budget.fill(0)
    budget.take("", int(spent_share * 100 * SLOT_BYTES))
    return story, oracle


@tiers
@pytest.mark.parametrize(("spent", "written"), [(0.0, 3), (0.5, 0), (0.95, 0)])
def test_the_less_is_left_of_the_budget_the_likelier_a_use_must_be(
    spent: float, written: int, settings: Mapping[str, Any]
) -> None:
    story, oracle = forecasting(0.25, spent, settings)
    story.write_behind("abc")
    assert story.on_nvme("abc") == written
    assert story.counts.refused_count == 3 - written
    assert oracle.seconds_asked == pytest.approx(7200 if settings else 3600 * POOL_SLOTS / 100)
    likelier, _ = forecasting(0.7, spent, settings)
    likelier.write_behind("abc")
    assert likelier.on_nvme("abc") == 3


def test_without_a_forecast_the_remote_tier_gets_nothing_used_once() -> None:
    story = TieredStory(with_budget(100, REMOTE))
    story.write_behind("abc")
    assert story.on_nvme("abc") == 0
    assert story.counts.waiting_demote_count == 0
    story.use("abc")
    story.tick(0.0)
    story.world.finish_work()
    assert story.on_nvme("abc") == 3


def test_room_in_the_remote_tier_is_no_budget() -> None:
    story = TieredStory(with_budget(2, REMOTE))
    for name in ("abc", "xyz"):
        story.offload(name)
        story.use(name)
        story.tick(0.0)
        story.world.finish_work()
    assert story.on_nvme("abc") + story.on_nvme("xyz") == 3, "one batch is the most it may exceed"


def test_what_was_refused_goes_down_when_it_was_used_twice() -> None:
    story, _ = forecasting(0.25, 0.9)
    story.write_behind("abc")
    assert story.on_nvme("abc") == 0
    story.use("abc")
    story.tick(0.0)
    story.world.finish_work()
    assert story.on_nvme("abc") == 3


def test_what_nobody_will_use_is_not_written_though_it_was_used_often() -> None:
    story, _ = forecasting(0.0, 0.0)
    story.write_behind("abc")
    story.use("abc")
    story.use("abc")
    story.tick(0.0)
    story.world.finish_work()
    assert story.on_nvme("abc") == 0


def test_nothing_goes_down_without_budget() -> None:
    story = TieredStory(with_budget(0), segment_count=2)
    story.write_behind("abcdefgh")
    assert story.on_nvme("abcdefgh") == 8
    story.world.run(ev.Evict(NS, packed(chain("abcdefgh"))))
    story.write_behind("xyz")
    story.use("xyz")
    story.tick(100.0)
    story.world.finish_work()
    assert story.on_nvme("xyz") == 0


# ------------------------------------------------------------------------------------- bad endings


def test_a_block_that_was_refused_goes_down_a_moment_later(story: TieredStory) -> None:
    """Not at once: whoever is off would refuse it again and again."""
    story.offload("ab")
    story.mover.finish(story.under_way[0], TransferOutcome.REFUSED)
    story.tick(0.0)
    assert (story.under_way, story.on_nvme("ab"), story.matched("ab")) == ([], 0, 2)
    story.tick(1.0)
    story.world.finish_work()
    assert story.on_nvme("ab") == 2
    story.world.check([chain("ab")])


def test_a_block_that_could_not_be_written_may_go_down_at_its_next_use(story: TieredStory) -> None:
    story.offload("ab")
    story.mover.finish(story.under_way[0], TransferOutcome.FAILED)
    story.world.finish_work()
    assert (story.on_nvme("ab"), story.matched("ab")) == (0, 2)
    story.use("ab")
    story.tick(0.0)
    story.world.finish_work()
    assert story.on_nvme("ab") == 2
    story.world.check([chain("ab")])


def test_a_block_scribbled_over_after_its_checksum_is_a_miss(story: TieredStory) -> None:
    slots = story.offload("abc")
    story.world.scribble(slots[1])
    story.world.finish_work()
    assert story.matched("abc") == 1
    assert story.on_nvme("abc") == 1
    assert story.free_count() == 15
    story.world.check([chain("abc")])


def test_a_place_voided_meanwhile_gives_its_block_no_copy(story: TieredStory) -> None:
    slots = story.offload("ab")
    story.world.scribble(slots[1])
    story.mover.move(story.under_way[0], 0)
    story.mover.move(story.under_way[0], 1)  # Not read again: somebody else has found out.
    story.world.run(ev.SlotsCorrupt(NS, slots_of(slots[:1])))
    story.commit(chain("ab")[:1], story.reserve(1))
    transfer = story.under_way[0]
    transfer.outcomes[:] = [TransferOutcome.DONE, TransferOutcome.DONE]
    story.mover.finish(transfer)
    assert story.on_nvme("ab") == 0
    story.world.finish_work()
    story.world.check([chain("ab")])


def test_blocks_cleared_while_they_are_written_do_not_come_back(story: TieredStory) -> None:
    story.offload("ab")
    story.world.clear(NS)
    story.world.finish_turns()
    story.offload("ab")
    story.mover.finish(story.under_way[0])
    assert story.on_nvme("ab") == 0
    story.world.finish_work()
    story.world.check([chain("ab")])
    story.world.assert_all_free()


def test_a_pool_that_takes_no_more_writes_still_is_read(story: TieredStory) -> None:
    story.write_behind("ab")
    assert story.world.nvme is not None
    story.world.nvme.worsen(readable=True)
    story.write_behind("xy")
    assert story.on_nvme("xy") == 0
    story.leave_memory()
    story.acquire_pending("ab")
    story.world.finish_work()
    assert story.in_memory("ab") == 2
    assert story.world.run(ev.HintPaused(NS, packed(chain("ab")))) == ins.HintUsed(False)


def test_a_pool_that_is_gone_takes_its_blocks_along_and_no_others(story: TieredStory) -> None:
    story.write_behind("ab")
    story.leave_memory()
    story.write_behind("xy")
    assert story.world.nvme is not None
    story.world.nvme.worsen(readable=False)
    story.world.finish_work()
    assert (story.matched("ab"), story.matched("xy")) == (0, 2)
    assert not story.disk.rows
    story.world.check([chain("ab"), chain("xy")])
    story.world.assert_all_free()


def test_checksums_of_the_slot_table_go_down_with_the_blocks(story: TieredStory) -> None:
    slots = story.offload("ab")
    expected = [story.world.checksum_at[slot] for slot in slots]
    story.world.finish_work()
    rows = sorted(story.disk.rows.values(), key=lambda row: row.sequence)
    assert [row.checksum for row in rows] == expected
    assert np.array(expected).all()
