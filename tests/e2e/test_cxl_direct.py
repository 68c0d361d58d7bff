"""Engines that read the CXL tier themselves: real processes, on a node of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtier.connector import StepOutcome
from kvtier.io.nodes import read_nodes
from tests.support.connector_rig import numbered_chain
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.engine_half import CALM, WAIT_SECONDS, start_engine
from tests.support.known_blocks import SHARD_BYTES
from tests.support.nvme_daemon import wait_metric
from tests.support.processes import CallFailed, Engine, engine_processes, eventually

pytestmark = pytest.mark.slow
rare = pytest.mark.torture  # `make test` has fifteen seconds for all of this.

CHAIN = 8
DRAM_BYTES = 8 << 20
CXL_BYTES = 32 << 20
SLAB_BYTES = 2 << 20
IN_DRAM = DRAM_BYTES // SHARD_BYTES
CXL_BLOCKS = 'kvtier_tier_blocks{tier="cxl"}'
CXL_HITS = 'kvtier_hit_blocks_total{call="acquire",tier="cxl"}'
PINNED = 'kvtier_tier_slots{state="pinned",tier="cxl"}'
PROMOTED = 'kvtier_cxl_transferred_blocks_total{direction="promote",outcome="done"}'
# What has to come up first is waited for as long as the test's own patience.
AWAITING = replace(CALM, nvme_wait_seconds_min=WAIT_SECONDS, nvme_wait_seconds_max=WAIT_SECONDS)
ONES_OWN = {"cxl.single_tenant": "true", "cxl.onboard": "direct", "lease.grace_seconds": "0.1"}


def node_of_this_machine() -> int:
    node = next((one.index for one in read_nodes() if one.memory_bytes), None)
    if node is None:
        pytest.skip("the kernel tells nothing of NUMA nodes")
    return node


@contextlib.contextmanager
def running(options: Mapping[str, str] = ONES_OWN) -> Iterator[RunningDaemon]:
    settings = {
        "cxl.node": str(node_of_this_machine()),
        "cxl.bytes": str(CXL_BYTES),
        "cxl.slab_bytes": str(SLAB_BYTES),
        **options,
    }
    with running_daemon(dram_bytes=DRAM_BYTES, slab_bytes="2MiB", options=settings) as daemon:
        daemon.wait_populated()
        wait_metric(daemon, 'kvtier_cxl_state{state="on"}', 1)
        yield daemon


def fill(daemon: RunningDaemon, engine: Engine, count: int, label: str = "chain") -> None:
    """Offload so many chains, and let each go down before the next one."""
    before = daemon.metrics()[CXL_BLOCKS]
    for number in range(count):
        assert engine.ask("offload", label=f"{label} {number}", count=CHAIN)["count"] == CHAIN
        wait_metric(daemon, CXL_BLOCKS, before + (number + 1) * CHAIN)


def lease(engine: Engine, label: str) -> dict[str, Any]:
    return engine.ask("lease", label=label, count=CHAIN)


def read_or_error(engine: Engine, label: str) -> int | str:
    try:
        return int(engine.ask("read_leased", label=label)["count"])
    except CallFailed as error:
        return str(error).partition(":")[0]


def pinned(daemon: RunningDaemon) -> float:
    return daemon.metrics()[PINNED]


def test_blocks_are_read_where_they_lie_and_hits_are_counted_as_the_tiers() -> None:
    with running() as daemon, engine_processes() as engines:
        engine = engines.start(daemon.socket, maps_segments=1)
        count = 2 * IN_DRAM // CHAIN
        fill(daemon, engine, count)
        found = [lease(engine, f"chain {number}") for number in range(3)]
        assert [(one["count"], one["direct"]) for one in found] == [(CHAIN, CHAIN)] * 3
        for number in range(3):
            assert engine.ask("read_leased", label=f"chain {number}")["count"] == CHAIN
        metrics = daemon.metrics()
        assert metrics[CXL_HITS] == 3 * CHAIN
        assert metrics.get(PROMOTED, 0) == 0, "nothing was copied up"
        assert metrics["kvtier_cxl_direct_info"] == 1
        assert metrics["kvtier_cxl_direct_blocks_total"] == 3 * CHAIN
        asked = metrics['kvtier_asked_blocks_total{call="acquire"}']
        hits = sum(
            value
            for name, value in metrics.items()
            if name.startswith("kvtier_hit_blocks_total") and "acquire" in name
        )
        assert hits + metrics['kvtier_miss_blocks_total{call="acquire"}'] == asked
        assert "onboard=direct" in daemon.log_text.replace('"', "")


@rare
def test_a_client_that_does_not_know_segments_is_served_through_dram() -> None:
    with running() as daemon, engine_processes() as engines:
        engine = engines.start(daemon.socket)
        fill(daemon, engine, 2 * IN_DRAM // CHAIN)
        assert lease(engine, "chain 0") == {"count": 0, "direct": 0}
        found = engine.ask("acquire", label="chain 0", count=CHAIN, wait_seconds=5.0)
        assert found["count"] == CHAIN


def test_a_killed_engine_lets_go_and_a_leased_segment_outlives_all_that_is_filled() -> None:
    with running() as daemon, engine_processes() as engines:
        reader = engines.start(daemon.socket, maps_segments=1)
        killed = engines.start(daemon.socket, maps_segments=1)
        fill(daemon, reader, 2 * IN_DRAM // CHAIN)
        assert lease(reader, "chain 0")["direct"] == CHAIN
        assert lease(killed, "chain 1")["direct"] == CHAIN
        eventually(lambda: pinned(daemon) == 2 * CHAIN, "both are pinned")
        killed.kill()
        eventually(lambda: pinned(daemon) == CHAIN, "the dead engine holds nothing")
        for number in range(2 * CXL_BYTES // SHARD_BYTES // CHAIN):
            label = f"other {number}"
            assert reader.ask("offload", label=label, count=CHAIN)["count"] == CHAIN
        assert reader.ask("read_leased", label="chain 0")["count"] == CHAIN
        assert lease(reader, "chain 3")["count"] == 0, "the pool has gone round"


def test_bytes_stay_right_for_an_engine_whose_daemon_is_killed() -> None:
    with running() as daemon, engine_processes() as engines:
        engine = engines.start(daemon.socket, maps_segments=1)
        fill(daemon, engine, 2 * IN_DRAM // CHAIN)
        assert lease(engine, "chain 0")["direct"] == CHAIN
        daemon.kill()
        answer = read_or_error(engine, "chain 0")
        assert answer in (CHAIN, "StaleSlot")
        daemon.start()
        daemon.wait_populated()
        wait_metric(daemon, 'kvtier_cxl_state{state="on"}', 1)
        eventually(lambda: read_or_error(engine, "chain 0") == "StaleSlot", "that life is over")
        eventually(lambda: engine.ask("session")["mapped"] > 0, "it is back")
        fill(daemon, engine, 2 * IN_DRAM // CHAIN, label="again")
        eventually(lambda: lease(engine, "again 0")["direct"] == CHAIN, "mapped anew")
        assert engine.ask("read_leased", label="again 0")["count"] == CHAIN


@pytest.mark.parametrize("on_gpu", [False, True], ids=["host", "fake GPU"])
@pytest.mark.parametrize("shard_count", [1, pytest.param(2, marks=rare)])
def test_connector_onboards_from_the_tier_and_with_a_gpu_through_dram(
    shard_count: int, on_gpu: bool
) -> None:
    chains = [numbered_chain(20, f"chain {number} ") for number in range(16 // shard_count)]
    with running() as daemon:
        engine = start_engine(
            daemon.socket, shard_count=shard_count, settings=AWAITING, on_gpu=on_gpu
        )
        try:
            wanted = []
            for number, chain in enumerate(chains):
                engine.fill(len(chain), seed=number)
                wanted.append([copier.blocks[: len(chain)].copy() for copier in engine.copiers])
                engine.offload(f"offload {number}", chain)
                wait_metric(daemon, CXL_BLOCKS, (number + 1) * len(chain))
            for number in range(2):
                for copier in engine.copiers:
                    copier.blocks[:] = 0
                done = engine.onboard(f"onboard {number}", chains[number])
                assert done == StepOutcome(onboarded=(f"onboard {number}",))
                found = [copier.blocks[: len(chains[number])] for copier in engine.copiers]
                assert all(map(np.array_equal, found, wanted[number]))
            count = 2 * len(chains[0])
            metrics = daemon.metrics()
            assert metrics[CXL_HITS] == count
            assert metrics.get(PROMOTED, 0) == (count if on_gpu else 0)
        finally:
            engine.close()
