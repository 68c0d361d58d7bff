"""What is told of the NVMe tier, without one, before it is read, and while it is used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from kvtier.cli.stats import text_of
from kvtier.core.stats import LowerCounts
from kvtier.metrics import Metrics
from kvtier.server.base import Base
from kvtier.server.core_loop import CoreLoop
from kvtier.server.namespaces import Namespaces
from kvtier.server.nvme import NvmeKeeper
from kvtier.server.nvme_report import NvmeReport
from kvtier.server.wear import WearMeter
from kvtier.types import NamespaceId, TierName
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.clock import ManualClock

ONE = NamespaceId(1)

COUNTS = LowerCounts(
    segment_count=10,
    free_segment_count=4,
    slot_count=600,
    block_count=600,
    demoting_count=5,
    promoting_count=3,
    waiting_demote_count=70,
    budget_bytes_left=-5,
    written_bytes=1000,
    reinserted_count=6,
    reused_segment_count=2,
    dropped_count=90,
)


@dataclass
class Keeper:
    """What the report asks of the keeper."""

    state: str = "on"
    capacity_bytes: int = 1 << 30
    endurance_bytes_per_day: int = 1 << 31
    queued_count: int = 8
    dirty_page_count: int = 7
    recovered_count: int = 300
    recovery_seconds: float = 0.5
    block_counts: dict[str, int] = field(default_factory=lambda: {"demote": 5, "promote": 3})
    wear: WearMeter = field(default_factory=WearMeter)


def report_of(keeper: Keeper | None) -> tuple[NvmeReport, Metrics]:
    metrics = Metrics()
    base = Base(cast(CoreLoop, None), cast(Namespaces, None), ManualClock(100_000.0), metrics)
    return NvmeReport(base, cast(NvmeKeeper, keeper)), metrics


def states(metrics: Metrics) -> dict[str, float]:
    name = "kvtier_nvme_state{state="
    return {
        key.removeprefix(name).strip('"}'): value
        for key, value in metrics.samples().items()
        if key.startswith(name)
    }


def test_without_nvme_the_tier_is_absent() -> None:
    report, metrics = report_of(None)
    report.refresh(None)
    assert {state for state, value in states(metrics).items() if value} == {"absent"}
    assert report.tier_stats(None) == []


@pytest.mark.parametrize("state", ["recovering", "on", "read_only", "off"])
def test_exactly_one_state_is_told(state: str) -> None:
    keeper = Keeper(state="on")
    report, metrics = report_of(keeper)
    report.refresh(None)
    keeper.state = state
    report.refresh(None)
    assert {one for one, value in states(metrics).items() if value} == {state}


def test_segments_and_blocks_add_up_and_a_budget_that_is_overdrawn_is_none() -> None:
    report, metrics = report_of(Keeper())
    for _ in range(2):  # Counts since start are followed, not added.
        report.refresh(COUNTS)
    found = metrics.samples()
    assert found['kvtier_nvme_segments{state="free"}'] == 4
    assert found['kvtier_nvme_segments{state="bound"}'] == 6
    assert found['kvtier_tier_blocks{tier="nvme"}'] == 600
    assert found['kvtier_tier_slots{state="reserved",tier="nvme"}'] == 5
    assert found["kvtier_nvme_unwritten_table_bytes"] == 7 * 4096
    assert found["kvtier_nvme_write_budget_bytes"] == 0
    assert found["kvtier_nvme_dropped_blocks_total"] == 90
    assert found["kvtier_nvme_reused_segments_total"] == 2
    assert found["kvtier_nvme_reinserted_blocks_total"] == 6
    assert found['kvtier_transfer_blocks{direction="promote"}'] == 3
    assert found["kvtier_demote_waiting_blocks"] == 70
    [tier] = report.tier_stats(COUNTS)
    assert (tier.tier, tier.slot_count, tier.ready_count) == ("nvme", 605, 600)
    assert (tier.reserved_count, tier.pinned_count, tier.free_count) == (5, 3, 0)


def test_wear_is_the_price_of_a_hit_and_the_last_day_against_endurance() -> None:
    keeper = Keeper()
    keeper.wear.note(5000, now=1000.0)  # More than a day ago.
    keeper.wear.note(3000, now=99_000.0)
    report, metrics = report_of(keeper)
    report.refresh(COUNTS)
    assert metrics.samples()["kvtier_nvme_hit_written_bytes"] == 0
    # A match costs nothing and gives nothing.
    metrics.blocks.asked.note(ONE, "match", 9, [(TierName.NVME, 9)], "")
    metrics.blocks.asked.note(ONE, "acquire", 3, [(TierName.DRAM, 1), (TierName.NVME, 2)], "")
    metrics.blocks.asked.note(ONE, "get", 2, [(TierName.NVME, 2)], "")
    report.refresh(COUNTS)
    found = metrics.samples()
    assert found["kvtier_nvme_hit_written_bytes"] == 2000
    assert found["kvtier_nvme_day_written_bytes"] == 3000
    assert found["kvtier_nvme_day_endurance_bytes"] == 1 << 31


def test_stats_for_people_tell_the_state_and_no_free_slots_of_nvme() -> None:
    report, metrics = report_of(Keeper(state="read_only"))
    report.refresh(COUNTS)
    stats = pb.StatsResponse(tiers=report.tier_stats(COUNTS), counters=metrics.samples())
    lines = text_of(stats).splitlines()
    [tier] = [line.split() for line in lines if line.startswith("nvme ") and "1.0 GiB" in line]
    assert tier[-5:] == ["605", "-", "600", "5", "3"]
    [row] = [line for line in lines if line.startswith("read_only")]
    assert "4 of 10" in row
    assert "nvme" not in text_of(pb.StatsResponse())
