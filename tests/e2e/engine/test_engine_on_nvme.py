"""The engine and a daemon that was killed: its KV comes back from NVMe, and no token changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.engine.config import SamplingParams
from kvtier.types import TierName
from tests.support.daemon import RunningDaemon
from tests.support.engines import (
    PATIENT,
    device_bytes,
    engine_on,
    hashes_of,
    offload_prompts,
    patient_client,
)
from tests.support.nvme_daemon import make_pool, running_nvme_daemon, wait_below, wait_state
from tests.support.tiny_models import prompt_of, tokens_alone

pytestmark = pytest.mark.slow

ONE_TOKEN = SamplingParams(tokens_max=1)
GREEDY = SamplingParams(tokens_max=6)
PROMPT = prompt_of(150, seed=11)
BLOCK_COUNT = len(hashes_of(PROMPT))
# Blocks are tiny, so a rate of nothing makes the wait for them as long as the test's patience.
AWAITING = replace(PATIENT, nvme_wait_seconds_min=20.0, nvme_wait_seconds_max=20.0)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    make_pool(tmp_path / "pool")
    with running_nvme_daemon(tmp_path / "pool") as running:
        yield running


def test_engine_gets_the_kv_of_before_the_kill_and_gives_the_same_tokens(
    daemon: RunningDaemon,
) -> None:
    with engine_on(patient_client(daemon.socket)) as first:
        offload_prompts(first, [PROMPT], ONE_TOKEN)
        computed = device_bytes(first, PROMPT)
        wait_below(daemon, BLOCK_COUNT)
    daemon.restart()
    wait_state(daemon, "on")
    with engine_on(patient_client(daemon.socket), settings=AWAITING) as second:
        result = second.engine.generate([PROMPT], GREEDY)[0]
        assert result.token_ids == tokens_alone(PROMPT, GREEDY)
        assert result.kvtier_count == 4 * BLOCK_COUNT
        assert device_bytes(second, PROMPT) == computed
        stats = second.scheduler.stats()
        assert stats.onboarded_tier_blocks == {TierName.NVME: BLOCK_COUNT}
        assert second.engine.check_invariants() == []
        assert not second.client.check().violations


def test_only_what_is_in_no_tier_is_offloaded_after_a_restart(daemon: RunningDaemon) -> None:
    with engine_on(patient_client(daemon.socket)) as first:
        offload_prompts(first, [PROMPT[:80]], ONE_TOKEN)
        wait_below(daemon, 20)
    daemon.restart()
    wait_state(daemon, "on")
    with engine_on(patient_client(daemon.socket), settings=AWAITING) as second:
        offload_prompts(second, [PROMPT], ONE_TOKEN)
        stats = second.scheduler.stats()
        assert stats.onboarded_tier_blocks == {TierName.NVME: 20}
        assert stats.offload_planned_blocks == BLOCK_COUNT - 20, "offloaded what is on NVMe"
    with engine_on(patient_client(daemon.socket), settings=AWAITING) as third:
        result = third.engine.generate([PROMPT], GREEDY)[0]
        assert result.token_ids == tokens_alone(PROMPT, GREEDY)
        assert third.scheduler.stats().onboarded_tier_blocks == {TierName.DRAM: BLOCK_COUNT}
