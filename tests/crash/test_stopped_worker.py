"""A worker that is stopped in mid-copy, whose scheduler is killed, and which then goes on.

Nobody can tell it to stop; so its slots must not have a new owner before it is quiet or dead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.forms import rounds
from tests.support.observer import Observer, observing
from tests.support.processes import (
    Engine,
    Engines,
    engine_processes,
    eventually,
    need_pid_namespaces,
)

GRACE_SECONDS = 0.2
OPTIONS = {"lease.grace_seconds": str(GRACE_SECONDS)}
SLOT_COUNT = 128  # 4 slabs of 4 MiB.


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(dram_bytes="16MiB", slab_bytes="4MiB", options=OPTIONS) as running:
        running.wait_populated()
        with observing(running.socket) as observer:
            fill_pool(observer, "first")  # So that every slab is bound.
        yield running


@dataclass
class Pair:
    """One engine of two processes; the worker writes into `slots` without end."""

    scheduler: Engine
    worker: Engine
    slots: list[int]


def start_pair(engines: Engines, daemon: RunningDaemon, *, pid_namespace: bool) -> Pair:
    engine_id = os.urandom(16)
    both = {"engine_id": engine_id, "pid_namespace": pid_namespace}
    worker = engines.launch(daemon.socket, role="WORKER", name="worker", **both)
    scheduler = engines.start(daemon.socket, role="SCHEDULER", name="scheduler", **both)
    worker.wait_started()
    given = scheduler.ask("reserve", count=4)
    worker.ask("begin_copy", slots=given["slots"], session=given["session"])
    return Pair(scheduler, worker, given["slots"])


def fill_pool(observer: Observer, label: str) -> dict[str, int]:
    """Offload more than the pool holds, so that every slot that is free is used again."""
    chains = {f"{label}-{number}": 4 for number in range(SLOT_COUNT * 5 // 4 // 4)}
    for one, count in chains.items():
        assert observer.offload(one, count) == count
    return chains


def count_resident(observer: Observer, chains: dict[str, int]) -> int:
    """Read every chain back, comparing bytes; how many blocks are hits."""
    return sum(observer.read_chain(one, count) for one, count in chains.items())


@pytest.mark.full_form
@pytest.mark.parametrize("pid_namespace", [False, True], ids=["here", "in a PID namespace"])
def test_stopped_worker_of_a_dead_scheduler_writes_into_no_reused_slot(
    daemon: RunningDaemon, pid_namespace: bool
) -> None:
    if pid_namespace:
        need_pid_namespaces()
    with engine_processes() as engines, observing(daemon.socket) as observer:
        for number in range(rounds(short=1, full=15)):
            pair = start_pair(engines, daemon, pid_namespace=pid_namespace)
            pair.worker.stop()
            pair.scheduler.kill()
            count = len(pair.slots)
            eventually(lambda: observer.dram().quarantined_count == count, "quarantine")  # noqa: B023
            time.sleep(2 * GRACE_SECONDS)  # Were it the time that frees them, they would be free.
            chains = fill_pool(observer, f"{pid_namespace}-{number}")
            assert observer.dram().quarantined_count == count
            pair.worker.resume()
            time.sleep(0.2)  # It writes on.
            resident_count = count_resident(observer, chains)
            assert resident_count >= 0.9 * (SLOT_COUNT - count), "most slots were in use"
            observer.check()
            assert observer.dram().quarantined_count == count, "it is still in its copy"
            pair.worker.ask("end_copy")
            observer.wait_settled()  # It was asked to be quiet, and now it is.
            assert count_resident(observer, chains) == resident_count
            pair.worker.end()


def test_slots_of_a_stopped_worker_return_when_it_is_killed(daemon: RunningDaemon) -> None:
    with engine_processes() as engines, observing(daemon.socket) as observer:
        pair = start_pair(engines, daemon, pid_namespace=False)
        pair.worker.stop()
        pair.scheduler.kill()
        chains = fill_pool(observer, "killed")
        assert observer.dram().quarantined_count == len(pair.slots)
        pair.worker.kill()
        observer.wait_settled()
        assert count_resident(observer, chains) > 0
        chains = fill_pool(observer, "after")
        assert count_resident(observer, chains) >= 0.9 * SLOT_COUNT, "its slots are used again"


def test_new_scheduler_of_the_engine_does_not_free_the_stopped_workers_slots(
    daemon: RunningDaemon,
) -> None:
    with engine_processes() as engines, observing(daemon.socket) as observer:
        pair = start_pair(engines, daemon, pid_namespace=False)
        pair.worker.stop()
        pair.scheduler.kill()
        engine_id = pair.scheduler.engine_id
        again = engines.start(daemon.socket, role="SCHEDULER", engine_id=engine_id)
        again.ask("session")
        chains = fill_pool(observer, "again")
        assert observer.dram().quarantined_count == len(pair.slots)
        pair.worker.resume()
        time.sleep(0.2)
        assert count_resident(observer, chains) > 0
        assert again.ask("reserve", count=1)["slots"], "the engine goes on beside it"
        pair.worker.ask("end_copy")
        again.end()
        observer.wait_settled()
        pair.worker.end()
