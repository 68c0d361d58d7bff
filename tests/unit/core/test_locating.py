"""Where a prefix is, tier by tier."""

from __future__ import annotations

import pytest

from kvtier.core import locating as module
from kvtier.core.locating import PlaceRun, PrefixPlaces
from kvtier.types import TierName
from tests.support.world import chain
from tests.unit.core.test_demotions import TieredStory
from tests.unit.core.test_manager import NS

DRAM, NVME = TierName.DRAM, TierName.NVME


@pytest.fixture
def story() -> TieredStory:
    return TieredStory()


def place(story: TieredStory, path: str) -> PrefixPlaces | None:
    return story.world.manager.locator.prefix(NS, chain(path)[-1])


def test_a_prefix_is_told_in_runs_of_equal_tiers(story: TieredStory) -> None:
    story.write_behind("abcd")
    story.reserve(14)  # Of sixteen: the tail of the chain leaves memory.
    story.world.check([chain("abcd")])
    found = place(story, "abcd")
    assert found is not None
    assert found.block_count == 4
    assert found.runs == (PlaceRun(0, 2, (DRAM, NVME)), PlaceRun(2, 2, (NVME,)))
    assert not found.is_cut_off


def test_a_block_names_the_prefix_that_ends_with_it(story: TieredStory) -> None:
    story.write_behind("abcd")
    found = place(story, "ab")
    assert found is not None
    assert found.runs == (PlaceRun(0, 2, (DRAM, NVME)),)


def test_what_is_not_resident_has_no_place(story: TieredStory) -> None:
    story.offload("ab")
    assert place(story, "abc") is None
    locator = story.world.manager.locator
    assert locator.has(NS, chain("ab")[1])
    assert not locator.has(NS, chain("abc")[2])
    assert sum(run.count for run in locator.leading(NS, chain("abcd"))) == 2


def test_a_walk_up_a_long_chain_ends(story: TieredStory, monkeypatch: pytest.MonkeyPatch) -> None:
    story.offload("abcd")
    monkeypatch.setattr(module, "WALKED_BLOCKS_MAX", 3)
    found = place(story, "abcd")
    assert found is not None
    assert (found.block_count, found.is_cut_off) == (3, True)
