"""The connector with the real client and daemon: bytes through the arenas, and law 2."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.client import Client, ClientSettings
from kvtier.connector import ConnectorSettings, SchedulerConnector, StepOutcome, WorkerConnector
from kvtier.namespace import NamespaceSpec
from kvtier.types import Role
from tests.support.connector_rig import numbered_chain
from tests.support.daemon import RunningDaemon, running_daemon

SHARD_BYTES = 64 << 10
WAIT_SECONDS = 20.0
# Far above what a hook may take, so that a hook that makes a call itself is seen.
PATIENT = ClientSettings(timeout_seconds=1.0)
Bytes = npt.NDArray[np.uint8]


def spec_of(weights: str, shard_count: int) -> NamespaceSpec:
    return NamespaceSpec(
        model="m",
        weights=weights,
        kv_dtype="bfloat16",
        layout="BLNHC",
        block_tokens=16,
        shard_bytes=SHARD_BYTES,
        hash_bytes=16,
        shard_count=shard_count,
    )


class HostCopier:
    """Device blocks that are rows of an array."""

    def __init__(self, block_count: int) -> None:
        self.blocks = np.zeros((block_count, SHARD_BYTES), dtype=np.uint8)

    def copy_out(self, device_blocks: Sequence[int], views: Sequence[Bytes]) -> None:
        for device_block, view in zip(device_blocks, views, strict=True):
            np.copyto(view, self.blocks[device_block])

    def copy_in(self, device_blocks: Sequence[int], views: Sequence[Bytes]) -> None:
        for device_block, view in zip(device_blocks, views, strict=True):
            np.copyto(self.blocks[device_block], view)


@dataclass
class EngineHalf:
    """What an engine has of kvtier: one scheduler side, one worker a shard, each its session."""

    clients: list[Client]
    scheduler: SchedulerConnector
    workers: list[WorkerConnector]
    copiers: list[HostCopier]

    def step(self) -> StepOutcome:
        plan = self.scheduler.build_plan()
        for worker in self.workers:
            worker.start(plan)
        return self.scheduler.on_results([r for worker in self.workers for r in worker.poll()])

    def wait(self, condition: Callable[[], bool]) -> list[StepOutcome]:
        """Step until the condition holds."""
        deadline, outcomes = time.monotonic() + WAIT_SECONDS, []
        while not condition():
            assert time.monotonic() < deadline, self.scheduler.stats()
            outcomes.append(self.step())
            time.sleep(0.002)
        return outcomes

    def fill(self, count: int, seed: int) -> None:
        for shard, copier in enumerate(self.copiers):
            rng = np.random.default_rng([seed, shard])
            copier.blocks[:count] = rng.integers(0, 256, (count, SHARD_BYTES), dtype=np.uint8)

    def offload(self, request_id: str, hashes: Sequence[bytes]) -> None:
        before = self.scheduler.stats().committed_blocks
        self.scheduler.on_new_request(request_id, hashes)
        self.scheduler.on_blocks_full(request_id, hashes, list(range(len(hashes))))
        self.wait(
            lambda: self.scheduler.stats().committed_blocks == before + len(hashes),
        )
        assert self.scheduler.request_finished(request_id) is False

    def onboard(self, request_id: str, hashes: Sequence[bytes]) -> StepOutcome:
        self.scheduler.on_new_request(request_id, hashes)
        count = self.scheduler.get_onboard_count(request_id, 0)
        deadline = time.monotonic() + WAIT_SECONDS
        while count is None and time.monotonic() < deadline:
            time.sleep(0.001)
            count = self.scheduler.get_onboard_count(request_id, 0)
        assert count == len(hashes)
        self.scheduler.on_allocated(request_id, list(range(count)), count)
        outcome = StepOutcome()
        while outcome == StepOutcome():
            assert time.monotonic() < deadline
            outcome = self.step()
        assert self.scheduler.request_finished(request_id) is False
        return outcome

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()
        for client in self.clients:
            client.close()


MakeEngine = Callable[..., EngineHalf]


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(dram_bytes="64MiB", slab_bytes="16MiB") as running:
        yield running


@pytest.fixture
def make_engine(daemon: RunningDaemon) -> Iterator[MakeEngine]:
    made: list[EngineHalf] = []

    def make(*, weights: str = "v1", shard_count: int = 1) -> EngineHalf:
        spec, engine_id = spec_of(weights, shard_count), os.urandom(16)
        if shard_count == 1:
            clients = [Client(daemon.socket, settings=PATIENT, engine_id=engine_id)]
            owners = clients
        else:
            owners = [
                Client(
                    daemon.socket,
                    settings=PATIENT,
                    engine_id=engine_id,
                    role=Role.WORKER,
                    shards=(shard,),
                )
                for shard in range(shard_count)
            ]
            scheduling = Client(
                daemon.socket, settings=PATIENT, engine_id=engine_id, role=Role.SCHEDULER
            )
            clients = [scheduling, *owners]
        for client in clients:
            assert client.wait_connected(WAIT_SECONDS)
        # Patient: these two cores may be busy with other tests.
        settings = ConnectorSettings(
            worker_count=shard_count,
            stock_blocks=64,
            onboard_wait_seconds=5.0,
            raise_internal_errors=True,
        )
        copiers = [HostCopier(64) for _ in range(shard_count)]
        scheduler = SchedulerConnector(clients[0], spec, settings=settings)
        workers = [
            WorkerConnector(client, spec, copier, shard=shard, settings=settings)
            for shard, (client, copier) in enumerate(zip(owners, copiers, strict=True))
        ]
        made.append(EngineHalf(clients, scheduler, workers, copiers))
        engine = made[-1]
        engine.wait(lambda: engine.scheduler.stock_count > 0)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("shard_count", [1, 2])
def test_second_engine_onboards_the_bytes_of_the_first(
    make_engine: MakeEngine, shard_count: int
) -> None:
    chain = numbered_chain(40)
    first = make_engine(shard_count=shard_count)
    first.fill(len(chain), seed=1)
    first.offload("a", chain)
    second = make_engine(shard_count=shard_count)
    assert second.onboard("b", chain) == StepOutcome(onboarded=("b",))
    for mine, theirs in zip(second.copiers, first.copiers, strict=True):
        assert np.array_equal(mine.blocks[: len(chain)], theirs.blocks[: len(chain)])
    assert second.scheduler.stats().onboarded_bytes == len(chain) * SHARD_BYTES * shard_count


def test_other_weights_never_match(make_engine: MakeEngine) -> None:
    chain = numbered_chain(4)
    first = make_engine()
    first.fill(len(chain), seed=2)
    first.offload("a", chain)
    other = make_engine(weights="v2")
    other.scheduler.on_new_request("b", chain)
    answer = other.scheduler.get_onboard_count("b", 0)
    while answer is None:  # Ends with the connector's own deadline.
        other.step()
        answer = other.scheduler.get_onboard_count("b", 0)
    assert answer == 0


def test_killed_daemon_costs_no_hook_any_time_and_comes_back(
    make_engine: MakeEngine, daemon: RunningDaemon
) -> None:
    chain = numbered_chain(20)
    engine = make_engine()
    engine.fill(len(chain), seed=3)
    engine.offload("a", chain)
    daemon.kill()
    slowest = 0.0
    for index in range(50):
        start = time.monotonic()
        engine.scheduler.on_new_request(f"r{index}", chain)
        engine.scheduler.get_onboard_count(f"r{index}", 0)
        engine.scheduler.on_blocks_full(f"r{index}", chain, list(range(20)))
        engine.step()
        slowest = max(slowest, time.monotonic() - start)
        time.sleep(0.002)
    assert slowest < 0.07, "a hook waited for a daemon that is not there"
    for index in range(50):
        engine.scheduler.request_finished(f"r{index}")
    daemon.start()
    for client in engine.clients:
        assert client.wait_connected(WAIT_SECONDS)
    engine.wait(lambda: engine.scheduler.stock_count > 0)
    engine.offload("again", chain)
    want = engine.copiers[0].blocks[:20].copy()
    engine.copiers[0].blocks[:] = 0
    assert engine.onboard("c", chain) == StepOutcome(onboarded=("c",))
    assert np.array_equal(engine.copiers[0].blocks[:20], want)


def test_hung_daemon_turns_into_a_miss_by_the_deadline(
    make_engine: MakeEngine, daemon: RunningDaemon
) -> None:
    chain = numbered_chain(8)
    engine = make_engine()
    engine.fill(len(chain), seed=4)
    engine.offload("a", chain)
    daemon.stop()
    try:
        begun, answer = time.monotonic(), None
        engine.scheduler.on_new_request("b", chain)
        slowest = time.monotonic() - begun
        while answer is None:
            start = time.monotonic()
            answer = engine.scheduler.get_onboard_count("b", 0)
            engine.step()
            slowest = max(slowest, time.monotonic() - start)
            time.sleep(0.001)
        assert answer == 0
        assert time.monotonic() - begun < 5.0 + 1.0
        assert slowest < 0.07, "a hook waited for a daemon that hangs"
    finally:
        daemon.resume()
    engine.scheduler.request_finished("b")
    assert engine.wait(lambda: engine.clients[0].connected) is not None
    engine.wait(lambda: engine.scheduler.stock_count > 0)
    assert engine.onboard("c", chain) == StepOutcome(onboarded=("c",))
