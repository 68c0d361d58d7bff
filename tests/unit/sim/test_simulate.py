"""The simulator: the daemon's core in virtual time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtier.errors import BadRequest
from kvtier.policy.curves import CurvesPolicy
from kvtier.policy.lru import LruPolicy
from kvtier.sim.machine import Lane, Machine
from kvtier.sim.replay import replay_policy
from kvtier.sim.simulate import simulate
from kvtier.sim.traces import Trace, TracedRequest, numbered
from kvtier.types import TierName

TOKENS = 512
BLOCK_BYTES = TOKENS * 4096
MACHINE = Machine(bytes_per_token=4096, engine_count=1)


def conversations(count: int, turns: int, *, seed: int = 1, apart: float = 5.0) -> Trace:
    """Chains that grow turn by turn, in mixed order."""
    chance = np.random.default_rng(seed)
    lengths = [0] * count
    found, now = [], 0.0
    for _ in range(count * turns):
        one = int(chance.integers(count))
        lengths[one] += int(chance.integers(1, 4))
        now += float(chance.exponential(apart))
        blocks = np.arange(lengths[one], dtype=np.int32) + 1000 * one
        found.append(TracedRequest(now, len(blocks) * TOKENS + 7, 20, blocks))
    return numbered("conversations", TOKENS, found)


def dram_of(blocks: int) -> Machine:
    return replace(MACHINE, dram_bytes=blocks * BLOCK_BYTES)


@pytest.mark.parametrize("blocks", [64, 96])
def test_the_core_hits_what_the_policy_alone_does(blocks: int) -> None:
    """Where requests do not overlap, and no lease is near half of memory."""
    trace = conversations(12, 6, apart=1000.0)
    alone = replay_policy(trace, LruPolicy, blocks).hit_ratio
    through = simulate(trace, dram_of(blocks), LruPolicy).hit_ratio()
    assert through == pytest.approx(alone, abs=0.02)


def test_all_is_hit_that_came_before_where_memory_is_ample() -> None:
    trace = conversations(6, 4, apart=1000.0)
    result = simulate(trace, dram_of(4096), LruPolicy)
    again = trace.access_count - trace.unique_count
    assert result.hits[TierName.DRAM] == again
    assert len(result.ttft_seconds) == result.requests == len(trace.requests)


def test_one_request_takes_its_prefill_and_the_next_its_load() -> None:
    blocks = np.arange(10, dtype=np.int32)
    trace = numbered(
        "two",
        TOKENS,
        [TracedRequest(0.0, 10 * TOKENS, 0, blocks), TracedRequest(9.0, 10 * TOKENS, 0, blocks)],
    )
    machine = replace(
        dram_of(64),
        prefill_tokens_per_second=5120.0,
        dram_bytes_per_second=10.0 * BLOCK_BYTES,
        dram_delay_seconds=0.25,
    )
    first, second = simulate(trace, machine, LruPolicy).ttft_seconds
    assert first == pytest.approx(1.0)
    assert second == pytest.approx(1.25 + 1 / 5120)


def test_nvme_gives_what_dram_has_evicted_and_counts_its_bytes() -> None:
    trace = conversations(12, 8, apart=20.0)
    small = dram_of(24)
    without = simulate(trace, small, LruPolicy)
    nvme = 8 * max(256 << 20, BLOCK_BYTES)
    result = simulate(
        trace, replace(small, nvme_bytes=nvme, nvme_write_bytes_per_hour=1e15), LruPolicy
    )
    assert result.hits[TierName.NVME] > 0
    assert result.hit_ratio() > without.hit_ratio() + 0.1
    assert result.nvme_read_bytes == result.hits[TierName.NVME] * BLOCK_BYTES
    assert result.nvme_written_bytes >= result.nvme_read_bytes / 4
    assert without.nvme_written_bytes == 0


def test_the_same_again_is_the_same() -> None:
    trace = conversations(8, 5)
    one, other = (simulate(trace, dram_of(32), CurvesPolicy).values() for _ in range(2))
    assert one == other


def test_a_lane_moves_one_after_the_other() -> None:
    lane = Lane(100.0, 0.5)
    assert lane.move(0.0, 100) == 1.5
    assert lane.move(0.0, 100) == 2.5
    assert lane.move(9.0, 100) == 10.5
    assert lane.moved_bytes == 300


def test_memory_for_no_block_is_refused() -> None:
    with pytest.raises(BadRequest, match="hold no block"):
        simulate(conversations(1, 1), replace(MACHINE, dram_bytes=4096), LruPolicy)
