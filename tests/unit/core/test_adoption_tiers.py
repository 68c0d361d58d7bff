"""Adopted blocks and what a tier below memory has of the same chains become one, in any order."""

from __future__ import annotations

import pytest

from kvtier.core import events as ev
from kvtier.types import TierName
from tests.support.adopting import hold_seconds, restart
from tests.support.world import chain
from tests.unit.core.test_demotions import TieredStory
from tests.unit.core.test_manager import NS


class AdoptedTieredStory(TieredStory):
    """`path` is in memory and on NVMe when the daemon is killed."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.slots = self.offload(path)
        self.world.finish_work()
        assert self.on_nvme(path) == len(path)

    def kill(self, *, nvme_first: bool, unreadable: tuple[int, ...] = ()) -> None:
        self.disk.write_table()
        self.disk.sync()

        def end_and_maybe_open() -> None:
            if nvme_first:
                self.world.open_nvme(self.disk)
                self.world.finish_turns()

        for shell in self.world.lower.values():
            shell.cut_power(lambda _: True)
        self.world.lower.clear()
        restart(
            self.world, [self.engine], lambda slot: slot in unreadable, before=end_and_maybe_open
        )
        if not nvme_first:
            self.world.finish_turns()
            self.world.open_nvme(self.disk)
        self.world.finish_work()

    def found(self, path: str) -> dict[TierName, int]:
        match = self.world.match(NS, chain(path))
        return {tier: count for tier, count in match.tiers if count}


@pytest.mark.parametrize("nvme_first", [True, False])
def test_a_block_of_both_tiers_is_one_block_with_two_copies(nvme_first: bool) -> None:
    story = AdoptedTieredStory("abcd")
    story.kill(nvme_first=nvme_first)
    assert story.found("abcd") == {TierName.DRAM: 4}
    assert story.on_nvme("abcd") == 4
    story.world.check([chain("abcd")])


@pytest.mark.parametrize("nvme_first", [True, False])
def test_what_memory_has_lost_is_found_below_and_goes_up_again(nvme_first: bool) -> None:
    story = AdoptedTieredStory("abcd")
    story.kill(nvme_first=nvme_first, unreadable=(story.slots[1],))
    assert story.found("abcd")[TierName.DRAM] == 1
    assert sum(story.found("abcd").values()) == 4
    story.engine.connect(story.engine.scheduler)
    story.read_mail(story.engine)
    granted = story.acquire_waiting("abcd")
    story.world.finish_work()
    assert granted is not None
    assert story.found("abcd") == {TierName.DRAM: 4}
    story.world.check([chain("abcd")])


@pytest.mark.parametrize("nvme_first", [True, False])
def test_after_the_holds_it_leaves_memory_and_stays_below(nvme_first: bool) -> None:
    story = AdoptedTieredStory("abcd")
    story.kill(nvme_first=nvme_first)
    story.engine.connect(story.engine.scheduler)
    story.read_mail(story.engine)
    story.world.now += hold_seconds(story.world)
    story.world.run(ev.Tick())
    story.leave_memory()
    assert story.found("abcd") == {TierName.NVME: 4}
    story.world.check([chain("abcd")])
