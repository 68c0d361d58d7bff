"""Engines that read the CXL tier themselves, under a mixed load, while others die.

Every byte that an engine reads is compared with what its hash says, by the engine.
"""

from __future__ import annotations

import time

import pytest

from kvtier.client import Client
from kvtier.types import Role
from tests.e2e.test_cxl_direct import ONES_OWN, running
from tests.support.daemon import RunningDaemon
from tests.support.forms import rounds, state_finding
from tests.support.nvme_daemon import wait_metric
from tests.support.processes import Engine, Engines, engine_processes, eventually

pytestmark = pytest.mark.torture

LEASE_SECONDS = 1.0
OPTIONS = {
    **ONES_OWN,
    "cxl.bytes": "64MiB",
    "lease.seconds_max": str(LEASE_SECONDS),
    "lease.margin_seconds": "0.2",
    "lease.grace_seconds": "0.1",
}
HITS_OF_A_ROUND = 400


def start(engines: Engines, daemon: RunningDaemon, number: int, *, clears: bool = False) -> Engine:
    engine = engines.start(daemon.socket, maps_segments=1, timeout_seconds=2.0)
    engine.ask("mix", seed=number, pause_seconds=0.001, others=[0, 1, 2, 3], clears=clears)
    return engine


def direct_hits(daemon: RunningDaemon) -> float:
    return daemon.metrics().get("kvtier_cxl_direct_blocks_total", 0)


@pytest.mark.timeout(600)
def test_engines_read_right_bytes_while_the_pool_goes_round_and_others_die() -> None:
    count, wrong = 0.0, []
    with running(OPTIONS) as daemon, engine_processes() as engines:
        for number in range(rounds(short=1, full=4)):
            busy = [start(engines, daemon, 0), start(engines, daemon, 1, clears=number % 2 == 1)]
            killed, stopped = (start(engines, daemon, one) for one in (2, 3))
            eventually(lambda: direct_hits(daemon) > 50, "a load", 60.0)
            stopped.stop()
            killed.kill()
            time.sleep(2 * LEASE_SECONDS)  # Its leases end, and their slots are filled anew.
            stopped.resume()
            eventually(lambda: direct_hits(daemon) > HITS_OF_A_ROUND, "hits", 120.0)
            busy.append(stopped)
            before = direct_hits(daemon)
            daemon.kill()
            daemon.start()
            daemon.wait_populated()
            wait_metric(daemon, 'kvtier_cxl_state{state="on"}', 1)
            count += before
            eventually(lambda: direct_hits(daemon) > 50, "mapped anew", 60.0)
            for engine in busy:
                engine.ask("end_churn")
                wrong += engine.of_kind("wrong")
            count += direct_hits(daemon)
            with Client(daemon.socket, role=Role.TOOL) as client:
                assert client.wait_connected(10)
                assert list(client.check().violations) == []
            for engine in busy:
                engine.kill()
        state_finding(f"{count:.0f} blocks were leased where they lay, {len(wrong)} wrong")
    assert wrong == []
