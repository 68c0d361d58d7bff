"""Metrics add up and say the same in both forms."""

from __future__ import annotations

import pytest

from kvtier.metrics import Metrics
from kvtier.metrics.labels import LIMITS, METHODS
from kvtier.server.security import ACCESS
from kvtier.types import TierName


def test_hits_and_misses_add_up_to_blocks_asked_for() -> None:
    metrics = Metrics()
    metrics.blocks.note_blocks("match", 10, [(TierName.DRAM, 6), (TierName.NVME, 1)])
    metrics.blocks.note_blocks("match", 5, [])
    found = metrics.samples()
    assert found['kvtier_asked_blocks_total{call="match"}'] == 15
    assert found['kvtier_hit_blocks_total{call="match",tier="dram"}'] == 6
    assert found['kvtier_hit_blocks_total{call="match",tier="nvme"}'] == 1
    assert found['kvtier_miss_blocks_total{call="match"}'] == 8


def test_hits_of_one_tier_are_told_by_call() -> None:
    metrics = Metrics()
    metrics.blocks.note_blocks("acquire", 10, [(TierName.DRAM, 6), (TierName.NVME, 3)])
    metrics.blocks.note_blocks("match", 10, [(TierName.NVME, 9)])
    assert metrics.blocks.hit_count("acquire", TierName.NVME) == 3
    assert metrics.blocks.hit_count("get", TierName.NVME) == 0


def test_counts_that_others_keep_are_followed() -> None:
    metrics = Metrics()
    for count in (2, 2, 5):
        metrics.state.note_evicted(count)
        metrics.nvme.note_reuse(reused_count=count, dropped_count=10 * count, reinserted_count=0)
    found = metrics.samples()
    assert found["kvtier_evicted_blocks_total"] == 5
    assert found["kvtier_nvme_reused_segments_total"] == 5
    assert found["kvtier_nvme_dropped_blocks_total"] == 50
    assert found["kvtier_nvme_reinserted_blocks_total"] == 0


def test_more_hits_than_blocks_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        Metrics().blocks.note_blocks("get", 1, [(TierName.DRAM, 2)])


def test_text_and_samples_say_the_same() -> None:
    metrics = Metrics()
    metrics.calls.note_call("Match", "ok", 0.001)
    lines = metrics.text().decode().splitlines()
    told = {line.rpartition(" ")[0] for line in lines if line and line[0] != "#"}
    assert told == set(metrics.samples())


def test_every_method_and_every_limit_is_declared() -> None:
    assert set(METHODS) == set(ACCESS)
    names = [one.name for one in Metrics().registry.declared]
    assert len(names) == len(set(names))
    assert len(LIMITS) == len(set(LIMITS))
