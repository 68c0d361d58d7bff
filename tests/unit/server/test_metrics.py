"""Metrics add up and say the same in both forms."""

from __future__ import annotations

import pytest

from kvtier.metrics import Metrics
from kvtier.metrics.asked import NAMES_MAX
from kvtier.metrics.labels import LIMITS, METHODS
from kvtier.server.security import ACCESS
from kvtier.types import NamespaceId, TierName

ONE, TWO = NamespaceId(1), NamespaceId(2)


def test_hits_and_misses_add_up_to_blocks_asked_for() -> None:
    metrics = Metrics()
    metrics.blocks.asked.note(ONE, "match", 10, [(TierName.DRAM, 6), (TierName.NVME, 1)], "unseen")
    metrics.blocks.asked.note(ONE, "match", 5, [], "evicted")
    found = metrics.samples()
    assert found['kvtier_asked_blocks_total{call="match"}'] == 15
    assert found['kvtier_hit_blocks_total{call="match",tier="dram"}'] == 6
    assert found['kvtier_hit_blocks_total{call="match",tier="nvme"}'] == 1
    assert found['kvtier_miss_blocks_total{call="match"}'] == 8


def test_hits_of_one_tier_are_told_by_call() -> None:
    metrics = Metrics()
    metrics.blocks.asked.note(ONE, "acquire", 10, [(TierName.DRAM, 6), (TierName.NVME, 3)], "doubt")
    metrics.blocks.asked.note(ONE, "match", 10, [(TierName.NVME, 9)], "unseen")
    assert metrics.blocks.asked.hit_count("acquire", TierName.NVME) == 3
    assert metrics.blocks.asked.hit_count("get", TierName.NVME) == 0


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
        Metrics().blocks.asked.note(ONE, "get", 1, [(TierName.DRAM, 2)], "")


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


def named(samples: dict[str, float], name: str, kind: str) -> float:
    return sum(
        value
        for key, value in samples.items()
        if key.startswith(f"kvtier_namespace_{kind}_blocks_total{{") and f'"{name}"' in key
    )


def test_each_namespace_and_each_reason_add_up() -> None:
    metrics = Metrics()
    asked = metrics.blocks.asked
    asked.name(ONE, "one@01", 10)
    asked.name(TWO, "two@02", 100)
    asked.note(ONE, "acquire", 9, [(TierName.DRAM, 3), (TierName.CXL, 1)], "pin_limit")
    asked.note(TWO, "acquire", 4, [(TierName.REMOTE, 4)], "")
    asked.note(TWO, "match", 2, [], "unseen")
    asked.note_resident([(ONE, 7)])
    found = metrics.samples()
    for name, count in (("one@01", 9), ("two@02", 6)):
        assert named(found, name, "asked") == count
        assert named(found, name, "hit") + named(found, name, "miss") == count
    assert found['kvtier_miss_reason_blocks_total{call="acquire",reason="pin_limit"}'] == 5
    assert found['kvtier_miss_blocks_total{call="acquire"}'] == 5
    assert found['kvtier_hit_bytes_total{tier="dram"}'] == 30
    assert found['kvtier_namespace_hit_bytes_total{namespace="two@02",tier="remote"}'] == 400
    assert found['kvtier_namespace_resident_bytes{namespace="one@01"}'] == 70


def test_names_are_few_and_the_rest_is_other() -> None:
    metrics = Metrics()
    asked = metrics.blocks.asked
    for number in range(NAMES_MAX + 5):
        asked.name(NamespaceId(number), f"model@{number}", 1)
        asked.note(NamespaceId(number), "match", 2, [(TierName.DRAM, 1)], "unseen")
    found = metrics.samples()
    named_asked = [
        key for key in found if key.startswith("kvtier_namespace_asked") and "atch" in key
    ]
    assert len(named_asked) == NAMES_MAX + 1
    assert named(found, "other", "asked") == 10
    assert found['kvtier_asked_blocks_total{call="match"}'] == 2 * (NAMES_MAX + 5)
    assert asked.named_count == NAMES_MAX


def test_series_of_a_forgotten_namespace_go_and_the_sums_stay() -> None:
    metrics = Metrics()
    asked = metrics.blocks.asked
    asked.name(ONE, "one@01", 10)
    asked.note(ONE, "get", 9, [(TierName.DRAM, 3)], "evicted")
    before = metrics.samples()
    asked.forget(ONE)
    found = metrics.samples()
    assert not [key for key in found if "one@01" in key]
    for key in (
        'kvtier_asked_blocks_total{call="get"}',
        'kvtier_hit_bytes_total{tier="dram"}',
        'kvtier_miss_reason_blocks_total{call="get",reason="evicted"}',
    ):
        assert found[key] == before[key] > 0
    asked.note(ONE, "get", 1, [(TierName.DRAM, 1)], "")
    found = metrics.samples()
    assert named(found, "one@01", "asked") == 1  # It begins again at 0.
    assert found['kvtier_asked_blocks_total{call="get"}'] == 10


def test_time_lost_is_told_apart_from_time_saved() -> None:
    metrics = Metrics()
    metrics.blocks.note_release(prefill_seconds=3.0, onboard_seconds=1.0)
    metrics.blocks.note_release(prefill_seconds=1.0, onboard_seconds=1.5)
    found = metrics.samples()
    assert (found["kvtier_saved_seconds_total"], found["kvtier_lost_seconds_total"]) == (2.0, 0.5)
