"""Connector, real client and blocks on NVMe: what is onboarded, and what a slow disk costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.connector import StepOutcome
from kvtier.types import TierName
from tests.e2e.client.conftest import eventually
from tests.support.connector_rig import numbered_chain
from tests.support.daemon import RunningDaemon
from tests.support.engine_half import CALM, WAIT_SECONDS, EngineHalf, start_engine
from tests.support.faulty_daemon import PROGRAM, VARIABLE
from tests.support.nvme_daemon import make_pool, running_nvme_daemon, wait_below, wait_state

pytestmark = pytest.mark.slow

CHAIN = numbered_chain(40)
# What is on NVMe is waited for: as long as the test's own patience.
AWAITING = replace(CALM, nvme_wait_seconds_min=WAIT_SECONDS, nvme_wait_seconds_max=WAIT_SECONDS)
HASTY_SECONDS = 3.0
# The disk does not answer at all: then the wait is what the request pays.
HASTY = replace(
    CALM, onboard_wait_seconds=0.5, nvme_bytes_per_second=1e6, nvme_wait_seconds_max=HASTY_SECONDS
)


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file: what is written into it is what the disk does from then on."""
    path = tmp_path / "fault"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


@pytest.fixture
def daemon(fault: Path, tmp_path: Path) -> Iterator[RunningDaemon]:
    """Started again since CHAIN was offloaded: it has it on NVMe only."""
    make_pool(tmp_path / "pool")
    with running_nvme_daemon(tmp_path / "pool", program=PROGRAM) as running:
        engine = start_engine(running.socket)
        try:
            engine.fill(len(CHAIN), seed=1)
            engine.offload("a", CHAIN)
            wait_below(running, len(CHAIN))
        finally:
            engine.close()
        running.restart()
        wait_state(running, "on")
        yield running
        fault.unlink(missing_ok=True)


def onboard_all(engine: EngineHalf, request_id: str) -> None:
    engine.copiers[0].blocks[:] = 0
    assert engine.onboard(request_id, CHAIN) == StepOutcome(onboarded=(request_id,))
    found = engine.copiers[0].blocks[: len(CHAIN)].copy()
    engine.fill(len(CHAIN), seed=1)
    assert np.array_equal(found, engine.copiers[0].blocks[: len(CHAIN)])


def test_blocks_come_from_nvme_after_a_restart_and_from_memory_after_that(
    daemon: RunningDaemon,
) -> None:
    engine = start_engine(daemon.socket, settings=AWAITING)
    try:
        onboard_all(engine, "b")
        assert engine.scheduler.stats().onboarded_tier_blocks == {TierName.NVME: len(CHAIN)}
        onboard_all(engine, "c")
        stats = engine.scheduler.stats()
        assert stats.onboarded_tier_blocks == {
            TierName.NVME: len(CHAIN),
            TierName.DRAM: len(CHAIN),
        }
        # The match may have come too late for the first one, but not for both.
        assert 1 <= stats.waiting_acquires <= 2
        assert stats.offload_planned_blocks == 0
    finally:
        engine.close()


def test_disk_that_hangs_costs_a_request_its_wait_and_nobody_else_anything(
    daemon: RunningDaemon, fault: Path
) -> None:
    engine = start_engine(daemon.socket, settings=HASTY)
    try:
        session, begun = engine.clients[0].session, time.monotonic()
        fault.write_text("stall")
        engine.scheduler.on_new_request("b", CHAIN)
        others = numbered_chain(8, "other")
        engine.fill(len(others), seed=2)
        assert engine.scheduler.get_onboard_count("b", 0) is None
        engine.offload("c", others)
        assert engine.onboard("d", others) == StepOutcome(onboarded=("d",))
        answer, slowest = engine.scheduler.get_onboard_count("b", 0), 0.0
        assert answer is None, "others were held up until the wait was over"
        while answer is None:  # Ends with the connector's own deadline.
            start = time.monotonic()
            answer = engine.scheduler.get_onboard_count("b", 0)
            engine.step()
            slowest = max(slowest, time.monotonic() - start)
            time.sleep(0.001)
        assert answer == 0
        assert time.monotonic() - begun < HASTY_SECONDS + 1.0
        assert slowest < 0.07, "a hook waited for the disk"
        engine.scheduler.request_finished("b")
        assert engine.clients[0].session == session, "the breaker has opened"
        eventually(lambda: daemon.metrics()["kvtier_leases"] == 0)
        engine.wait(lambda: engine.scheduler.lease_count == 0)
        fault.unlink()
    finally:
        engine.close()
    engine = start_engine(daemon.socket, settings=AWAITING)
    try:
        onboard_all(engine, "e")
        assert not engine.clients[0].check().violations
    finally:
        engine.close()
