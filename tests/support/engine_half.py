"""What an engine has of kvtier, with the real client: for tests of the connector on a daemon."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.client import Client, ClientSettings
from kvtier.connector import ConnectorSettings, SchedulerConnector, StepOutcome, WorkerConnector
from kvtier.connector.sharding import Place
from kvtier.connector.stream_copying import DeviceBlocks
from kvtier.cuda.device_layout import DeviceTensor, layout_of
from kvtier.cuda.fake import FakeCudart
from kvtier.namespace import NamespaceSpec
from kvtier.types import Role

SHARD_BYTES = 64 << 10
WAIT_SECONDS = 20.0
# Far above what a hook may take, so that a hook that makes a call itself is seen.
PATIENT = ClientSettings(timeout_seconds=1.0)
# Patient: these two cores may be busy with other tests.
CALM = ConnectorSettings(stock_blocks=64, onboard_wait_seconds=5.0, raise_internal_errors=True)
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


class FakeGpu:
    """Device blocks on a fake GPU; its time passes with the calls that are made to it."""

    def __init__(self, block_count: int) -> None:
        self.cuda = FakeCudart()
        address = self.cuda.allocate_device(block_count * SHARD_BYTES)
        memory = self.cuda.device_bytes(address, block_count * SHARD_BYTES)
        self.blocks = memory.reshape(block_count, SHARD_BYTES)
        tensor = DeviceTensor(address, (block_count, SHARD_BYTES), (SHARD_BYTES, 1), 1)
        compute = self.cuda.create_stream(0)
        self.copies = DeviceBlocks(self.cuda, 0, layout_of([tensor]), lambda: compute)


@dataclass
class EngineHalf:
    """What an engine has of kvtier: one scheduler side, one worker a shard, each its session."""

    clients: list[Client]
    scheduler: SchedulerConnector
    workers: list[WorkerConnector]
    copiers: list[HostCopier] | list[FakeGpu]

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
        for copier in self.copiers:
            if isinstance(copier, FakeGpu):
                copier.cuda.assert_clean()


def start_engine(
    socket: Path,
    *,
    weights: str = "v1",
    shard_count: int = 1,
    settings: ConnectorSettings = CALM,
    on_gpu: bool = False,
) -> EngineHalf:
    """Connected, with slots in its stock; on the host it reads the CXL tier where it may."""
    spec, engine_id = spec_of(weights, shard_count), os.urandom(16)
    if shard_count == 1:
        one = Client(socket, settings=PATIENT, engine_id=engine_id, maps_segments=not on_gpu)
        clients = owners = [one]
    else:
        owners = [
            Client(
                socket,
                settings=PATIENT,
                engine_id=engine_id,
                role=Role.WORKER,
                shards=(shard,),
                maps_segments=not on_gpu,
            )
            for shard in range(shard_count)
        ]
        scheduling = Client(socket, settings=PATIENT, engine_id=engine_id, role=Role.SCHEDULER)
        clients = [scheduling, *owners]
    for client in clients:
        assert client.wait_connected(WAIT_SECONDS)
    settings = replace(settings, worker_count=shard_count)
    copiers: list[HostCopier] | list[FakeGpu] = (
        [FakeGpu(64) for _ in range(shard_count)]
        if on_gpu
        else [HostCopier(64) for _ in range(shard_count)]
    )
    scheduler = SchedulerConnector(clients[0], spec, settings=settings)
    workers = [
        WorkerConnector(
            client,
            spec,
            copier.copies if isinstance(copier, FakeGpu) else copier,
            place=Place(shard, shard_count, shard),
            settings=settings,
        )
        for shard, (client, copier) in enumerate(zip(owners, copiers, strict=True))
    ]
    engine = EngineHalf(clients, scheduler, workers, copiers)
    engine.wait(lambda: engine.scheduler.stock_count > 0)
    return engine
