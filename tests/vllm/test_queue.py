"""A thousand requests in the queue of vLLM's real Scheduler, on a real daemon with their prefixes.

What the daemon says of its pins is read from its Stats, at every few steps.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.daemon import running_daemon
from tests.vllm.daemon_rig import DaemonRig, daemon_rig
from tests.vllm.scheduler_rig import prompt_of, with_settings

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

SLAB_SLOTS = 128
REQUEST_COUNT, PREFIX_COUNT, PREFIX_BLOCKS = 1000, 40, 10
PROMPT_TOKENS = PREFIX_BLOCKS * 16
# A machine that is busy with other tests must not turn hits into misses.
CALM = with_settings(stock_blocks=32, onboard_wait_seconds=5.0)


def store(rig: DaemonRig, count: int) -> None:
    """Have `count` prefixes in the daemon, each block of them, and nothing in the engine."""
    for number in range(count):
        rig.add(f"store{number}", prompt_of(PROMPT_TOKENS, seed=number), tokens=1)
        if number % 4 == 3:
            rig.settle()
    rig.settle()
    assert rig.core.stats().committed_blocks == count * PREFIX_BLOCKS
    rig.forget_own_cache()


class Watch:
    """Steps the engine, and remembers what the daemon had pinned at most."""

    def __init__(self, rig: DaemonRig) -> None:
        self.rig = rig
        self.pinned_max = self.lease_max = self.computed_tokens = self.step_count = 0

    def step(self) -> None:
        self.computed_tokens += self.rig.step().total_num_scheduled_tokens
        self.step_count += 1
        if self.step_count % 3 == 0:
            stats = self.rig.client.stats()
            self.pinned_max = max(self.pinned_max, stats.tiers[0].pinned_count)
            self.lease_max = max(self.lease_max, *(s.lease_count for s in stats.sessions))


def test_thousand_queued_requests_pin_what_can_be_loaded_and_all_of_them_hit(
    tiny_llama: Path,
) -> None:
    """Long enough that each turn but the first comes after the time a turn may be waited for."""
    slot_count, device_block_count = 4 * SLAB_SLOTS, 128
    assert device_block_count < slot_count // 2 < PREFIX_COUNT * PREFIX_BLOCKS
    with (
        running_daemon(dram_bytes=slot_count * DaemonRig.shard_bytes, slab_bytes="8MiB") as daemon,
        daemon_rig(
            tiny_llama,
            daemon.socket,
            device_block_count=device_block_count,
            scheduling={"max_num_seqs": 8},
            settings=CALM,
        ) as rig,
    ):
        daemon.wait_populated()
        store(rig, PREFIX_COUNT)
        began = time.monotonic()
        requests = [
            rig.add(f"r{n}", prompt_of(PROMPT_TOKENS, seed=n * 7 % PREFIX_COUNT), tokens=1)
            for n in range(REQUEST_COUNT)
        ]
        watch = Watch(rig)
        rig.wait(lambda: (watch.step(), not rig.scheduler.has_requests())[1])
        assert time.monotonic() - began > CALM.turn_wait_seconds
        assert all(request.is_finished() for request in requests)
        # Whatever the engine had itself: of each prompt the last token alone is computed.
        assert watch.computed_tokens == REQUEST_COUNT
        assert rig.core.stats().deadline_missed_requests == 0
        assert 1 < watch.lease_max <= device_block_count // PREFIX_BLOCKS
        assert PREFIX_BLOCKS < watch.pinned_max <= device_block_count
        rig.wait(lambda: rig.client.stats().tiers[0].pinned_count == 0)
        assert rig.core.lease_count == 0


def test_small_pool_is_never_pinned_beyond_its_half(tiny_llama: Path) -> None:
    """An engine with more room than the pool; what it does not get to lease it computes."""
    slot_count, prefix_count = SLAB_SLOTS, 8
    with (
        running_daemon(dram_bytes=slot_count * DaemonRig.shard_bytes, slab_bytes="8MiB") as daemon,
        daemon_rig(
            tiny_llama, daemon.socket, device_block_count=4 * slot_count, settings=CALM
        ) as rig,
    ):
        daemon.wait_populated()
        store(rig, prefix_count)
        assert prefix_count * PREFIX_BLOCKS > slot_count // 2
        for n in range(REQUEST_COUNT // 4):
            rig.add(f"r{n}", prompt_of(PROMPT_TOKENS, seed=n % prefix_count), tokens=1)
        watch = Watch(rig)
        rig.copier.may_load.clear()  # What is leased stays leased.
        rig.wait(lambda: (watch.step(), rig.core.stats().matched_blocks >= slot_count // 2)[1])
        for _ in range(9):
            watch.step()
        rig.copier.may_load.set()
        rig.wait(lambda: (watch.step(), not rig.scheduler.has_requests())[1])
        assert slot_count // 4 < watch.pinned_max <= slot_count // 2
        rig.wait(lambda: rig.client.stats().tiers[0].pinned_count == 0)
