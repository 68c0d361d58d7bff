"""The core with tiers below memory under faults; and what NVMe is worth under load."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.granting import Granting
from kvtier.core.index import NOBODY
from kvtier.core.manager import BlockManager
from kvtier.core.settings import ManagerConfig
from kvtier.policy.lru import LruPolicy
from kvtier.types import Cut, TierName
from tests.sim.load_simulation import (
    LOADED,
    WINDOW_SECONDS,
    LoadSimulation,
)
from tests.sim.simulation import SLOT_BYTES
from tests.sim.tiered_simulation import (
    DirectSimulation,
    TieredSimulation,
    TwoRungsSimulation,
)
from tests.support.forms import is_torture, rounds, sim_seeds

SEEDS = range(1000) if is_torture() else range(2)
TWO_RUNGS_SEEDS = range(1000) if is_torture() else range(2)
DIRECT_SEEDS = range(1000) if is_torture() else range(1)
LOAD_SECONDS = rounds(short=40, full=600)
NAMESPACE_COUNT = 3


@pytest.mark.slow
@pytest.mark.full_form
@pytest.mark.parametrize("seed", sim_seeds(SEEDS))
def test_right_bytes_or_a_miss_whatever_the_disk_does(seed: int) -> None:
    try:
        TieredSimulation(seed).run()
    except Exception as error:
        raise AssertionError(f"replay this with: make sim SEED={seed}") from error


@pytest.mark.slow
@pytest.mark.full_form
@pytest.mark.parametrize("seed", sim_seeds(TWO_RUNGS_SEEDS))
def test_right_bytes_or_a_miss_from_two_tiers_below_memory(seed: int) -> None:
    try:
        hits = TwoRungsSimulation(seed).run()
        assert min(hits.from_tier[tier] for tier in TwoRungsSimulation.config.lower) > 0, hits
    except Exception as error:
        raise AssertionError(f"replay this with: make sim SEED={seed}") from error


@pytest.mark.slow
@pytest.mark.full_form
@pytest.mark.parametrize("seed", sim_seeds(DIRECT_SEEDS))
def test_right_bytes_or_a_miss_where_engines_read_a_tier_themselves(seed: int) -> None:
    try:
        simulation = DirectSimulation(seed)
        simulation.run()
        assert simulation.hits.from_tier[TierName.CXL] > 0
        assert simulation.direct_count > 0, "nothing was leased where it lies"
    except Exception as error:
        raise AssertionError(f"replay this with: make sim SEED={seed}") from error


@pytest.mark.slow
def test_a_manager_that_never_promotes_is_not_good_enough() -> None:
    class LazyManager(BlockManager):
        def handle(self, event: ev.Event, now: float) -> list[ins.Instruction]:
            if isinstance(event, ev.Acquire):
                event = replace(event, wait_until=0.0)
            done = super().handle(event, now)
            return [
                replace(one, cut=Cut.MISS) if isinstance(one, ins.LeaseGranted) else one
                for one in done
            ]

    def make(config: ManagerConfig) -> BlockManager:
        return LazyManager(config, make_policy=LruPolicy)

    with pytest.raises(AssertionError, match="misses"):
        TieredSimulation(1, make).run()


@pytest.mark.slow
def test_a_pin_that_ends_with_the_deadline_is_not_good_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that began to copy in time may end late: that is what the margin is for."""
    whole = Granting.expire

    def expire(granting: Granting, now: float) -> None:
        for lease in granting.leases.all_leases():
            if lease.deadline <= now:
                granting.direct.unpin(lease.all_direct())
                lease.direct = [np.full(len(lease.all_direct()), NOBODY, np.int64)]
        whole(granting, now)

    monkeypatch.setattr(Granting, "expire", expire)
    with pytest.raises(AssertionError, match="reused under a direct lease"):
        DirectSimulation(3).run()


# --------------------------------------------------------------------------------------- under load


@pytest.fixture(scope="module")
def loaded() -> LoadSimulation:
    simulation = LoadSimulation(1, seconds=LOAD_SECONDS)
    simulation.play()
    simulation.world.check([])
    return simulation


@pytest.mark.slow
@pytest.mark.full_form
def test_what_is_resident_is_leased_from_either_tier(loaded: LoadSimulation) -> None:
    loaded.check_hits()
    assert loaded.disk.block_counts["promote"] > loaded.hits.leased_count / 10


@pytest.mark.slow
@pytest.mark.full_form
def test_the_pool_is_used_to_the_last_segment_and_none_is_starved(loaded: LoadSimulation) -> None:
    nvme, disk = loaded.counts, loaded.disk
    assert nvme.free_segment_count <= 2
    used_bytes = sum(
        disk.headers[slot // disk.row_count_max].layout.slot_bytes for slot in disk.rows
    )
    assert used_bytes > 0.6 * disk.segment_bytes * disk.segment_count
    lives = [loaded.world.life_counts[segment] for segment in range(disk.segment_count)]
    assert min(lives) >= 1
    assert max(lives) <= min(lives) + 1 + max(lives) / 4  # First in, first out.


@pytest.mark.slow
@pytest.mark.full_form
def test_no_namespace_is_starved(loaded: LoadSimulation) -> None:
    """Stalls last seconds: a window may pass without much, two must not."""
    windows = loaded.world.windows[: int(LOAD_SECONDS / WINDOW_SECONDS)]
    for first, second in pairwise(windows[1:]):
        assert len(first.demoted | second.demoted) == NAMESPACE_COUNT
        assert len(first.promoted | second.promoted) == NAMESPACE_COUNT


@pytest.mark.slow
@pytest.mark.full_form
def test_blocks_that_are_used_go_again_and_never_more_than_half(loaded: LoadSimulation) -> None:
    nvme = loaded.counts
    assert nvme.reused_segment_count > loaded.disk.segment_count / 2
    halves = (nvme.reused_segment_count + 1) * loaded.disk.row_count_max / 2
    assert 0 < nvme.reinserted_count <= halves
    assert nvme.dropped_count > 0


@pytest.mark.slow
@pytest.mark.full_form
def test_memory_of_the_core_is_flat(loaded: LoadSimulation) -> None:
    """The pool is full when half of the time is over."""
    sizes = loaded.footprints
    quarter = len(sizes) // 4
    assert max(sizes[-quarter:]) < 1.1 * max(sizes[-2 * quarter : -quarter])


@pytest.mark.slow
@pytest.mark.full_form
def test_no_event_begins_more_than_a_slice(loaded: LoadSimulation) -> None:
    """Whoever asks for blocks in memory waits behind one event at most."""
    largest, config = loaded.world.largest_moves, LOADED
    settings = config.lower[TierName.NVME]
    moved_bytes_max = settings.transfer_bytes_max + settings.batch_bytes
    assert largest["evict"] <= 2 * config.evict_slice_blocks  # For an acquire, and for one again.
    assert largest["promote"] * SLOT_BYTES <= moved_bytes_max
    assert largest["demote"] * SLOT_BYTES <= moved_bytes_max
    assert largest["forget"] <= max(loaded.disk.row_count_max, config.swept_slice_blocks)


@pytest.mark.slow
@pytest.mark.full_form
def test_blocks_come_back_after_the_daemon_was_killed(loaded: LoadSimulation) -> None:
    """Last: nothing of the daemon above is left afterwards."""
    stood_count, back_count = loaded.crash()
    loaded.world.check([])
    # What has moved since the table was written last is lost with the process. That is at most half
    # of a segment: much of a pool of 48, so several daemons are killed.
    for seed in range(2, 5):
        other = LoadSimulation(seed, seconds=LOAD_SECONDS)
        other.play()
        counts = other.crash()
        stood_count, back_count = stood_count + counts[0], back_count + counts[1]
    assert stood_count > 1000
    assert back_count >= 0.95 * stood_count


@pytest.mark.slow
@pytest.mark.full_form
def test_no_more_is_written_than_the_budget_allows() -> None:
    """An hour's share may be saved up, and what fills the empty pool is free; beyond that blocks
    that go again may be owed: half a segment, and one batch."""
    bytes_per_hour = 24.0 * SLOT_BYTES
    simulation = LoadSimulation(2, seconds=LOAD_SECONDS, bytes_per_hour=bytes_per_hour)
    simulation.play()
    disk, config = simulation.disk, simulation.config
    free_bytes = disk.segment_bytes * disk.segment_count
    allowed_bytes = free_bytes + bytes_per_hour * (1 + LOAD_SECONDS / 3600)
    owed_bytes = disk.segment_bytes / 2 + config.lower[TierName.NVME].batch_bytes
    written_bytes = simulation.counts.written_bytes
    assert allowed_bytes - bytes_per_hour / 2 < written_bytes <= allowed_bytes + owed_bytes
    assert simulation.counts.waiting_demote_count > 0, "nobody wanted to write more"
