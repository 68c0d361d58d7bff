"""A scheduler side and its workers over a fake client, every thread moved by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvtier.connector.jobs import StepOutcome, StepPlan
from kvtier.connector.scheduler import SchedulerConnector
from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.sharding import Place
from kvtier.connector.worker import WorkerConnector
from kvtier.namespace import NamespaceSpec
from kvtier.types import CommitOutcome
from tests.support.clock import ManualClock
from tests.support.fake_client import FakeClient, FakeNamespace
from tests.support.stepped_control import SteppedControl, SteppedLane

SHARD_BYTES = 16
Bytes = npt.NDArray[np.uint8]


def spec_of(weights: str = "v1", shard_count: int = 1) -> NamespaceSpec:
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


def chain_of(*names: str) -> list[bytes]:
    """Chained hashes: equal prefixes of names give equal hashes."""
    hashes, parent = [], b""
    for name in names:
        parent = hashlib.sha256(parent + name.encode()).digest()[:16]
        hashes.append(parent)
    return hashes


def numbered_chain(count: int, name: str = "block") -> list[bytes]:
    return chain_of(*(f"{name}{index}" for index in range(count)))


def content_of(block_hash: bytes, shard: int = 0, weights: str = "v1") -> Bytes:
    """The bytes that this block has in this shard; what an engine would compute."""
    digest = hashlib.sha256(block_hash + weights.encode() + bytes([shard])).digest()
    return np.frombuffer(digest[:SHARD_BYTES], dtype=np.uint8)


class DeviceCopier:
    """A BlockCopier over an array; `fail` lets its next copies raise."""

    def __init__(self, device_block_count: int) -> None:
        self.blocks = np.zeros((device_block_count, SHARD_BYTES), dtype=np.uint8)
        self.failures = 0
        self.copied_out: list[int] = []

    def copy_out(self, device_blocks: Sequence[int], views: Sequence[Bytes]) -> None:
        self._maybe_fail()
        for device_block, view in zip(device_blocks, views, strict=True):
            self.copied_out.append(device_block)
            view[:] = self.blocks[device_block]

    def copy_in(self, device_blocks: Sequence[int], views: Sequence[Bytes]) -> None:
        self._maybe_fail()
        for device_block, view in zip(device_blocks, views, strict=True):
            self.blocks[device_block] = view

    def _maybe_fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the device is on fire")


class Rig:
    """One engine's connector: `step` is what an engine does between two forward passes."""

    def __init__(
        self,
        *,
        slot_count: int = 64,
        worker_count: int = 1,
        replica_count: int = 1,
        device_block_count: int = 64,
        settings: ConnectorSettings | None = None,
        raises: bool = True,
    ) -> None:
        """`replica_count`: workers that hold the same shard. `raises`: internal errors come
        through, instead of disabling the connector."""
        shard_count = worker_count // replica_count
        self.clock = ManualClock()
        self.client = FakeClient(
            self.clock, slot_count=slot_count, shard_bytes=SHARD_BYTES, shard_count=shard_count
        )
        self.control = SteppedControl()
        settings = settings or ConnectorSettings(worker_count=worker_count, stock_blocks=16)
        self.settings = replace(settings, raise_internal_errors=raises)
        self.spec = spec_of(shard_count=shard_count)
        self.scheduler = SchedulerConnector(
            self.client,
            self.spec,
            settings=self.settings,
            clock=self.clock,
            control=self.control,
        )
        self.copiers = [DeviceCopier(device_block_count) for _ in range(worker_count)]
        self.lanes = [SteppedLane() for _ in range(worker_count)]
        self.workers = [
            WorkerConnector(
                self.client,
                self.spec,
                copier,
                place=Place(rank, worker_count, *divmod(rank, replica_count), replica_count),
                settings=self.settings,
                clock=self.clock,
                lane=lane,
            )
            for rank, (copier, lane) in enumerate(zip(self.copiers, self.lanes, strict=True))
        ]
        self.replica_count = replica_count
        self.plans: list[StepPlan] = []
        self.warm()

    @property
    def namespace(self) -> FakeNamespace:
        return self.client.open_namespace(self.spec)

    def warm(self) -> None:
        """Let the stock fill."""
        self.plan()
        self.answer()
        self.scheduler.on_results([])

    def plan(self) -> StepPlan:
        plan = self.scheduler.build_plan()
        self.plans.append(plan)
        for worker in self.workers:
            worker.start(plan)
        return plan

    def answer(self) -> None:
        """Make all calls that are queued; hooks see the answers."""
        self.control.step()

    def copy(self) -> None:
        for lane in self.lanes:
            lane.step()

    def results(self) -> StepOutcome:
        return self.scheduler.on_results([r for worker in self.workers for r in worker.poll()])

    def step(self) -> StepOutcome:
        self.plan()
        self.copy()
        outcome = self.results()
        self.answer()
        return outcome

    def compute(
        self, hashes: Sequence[bytes], device_blocks: Sequence[int], *, weights: str = "v1"
    ) -> None:
        """Write what the engine would have computed."""
        for rank, copier in enumerate(self.copiers):
            shard = rank // self.replica_count
            for block_hash, device_block in zip(hashes, device_blocks, strict=True):
                copier.blocks[device_block] = content_of(block_hash, shard, weights)

    def offload(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """A request comes, computes all its blocks, has them committed and goes."""
        device_blocks = list(range(len(hashes)))
        self.scheduler.on_new_request(request_id, hashes)
        self.answer()
        self.compute(hashes, device_blocks)
        self.scheduler.on_blocks_full(request_id, hashes, device_blocks)
        for _ in range(8):
            self.step()
        self.scheduler.request_finished(request_id)
        self.step()
        self.scheduler.on_results([])

    def onboard(self, request_id: str, hashes: Sequence[bytes], first: int) -> int:
        """A request comes and has its blocks promised and planned, into device blocks from
        `first` on; the number of them."""
        self.scheduler.on_new_request(request_id, hashes)
        self.answer()
        assert self.scheduler.get_onboard_count(request_id, 0) is None
        self.answer()
        count = self.scheduler.get_onboard_count(request_id, 0)
        assert count
        self.scheduler.on_allocated(request_id, list(range(first, first + count)), count)
        return count

    def check(self) -> None:
        assert self.client.violations == []
        assert self.scheduler.check_invariants() == []

    def check_nothing_held(self) -> None:
        """Once nobody works: no lease, no slot outside the stock, no request remembered."""
        self.check()
        assert not self.client.leases
        assert not self.scheduler.has_work
        assert len(self.client.reserved) == self.scheduler.stock_count


def begin(rig: Rig, request_id: str, chain: list[bytes], first: int = 0) -> list[int]:
    """A request comes, its match is answered, and its blocks are computed."""
    device_blocks = list(range(first, first + len(chain)))
    rig.scheduler.on_new_request(request_id, chain)
    rig.answer()
    rig.compute(chain, device_blocks)
    rig.scheduler.on_blocks_full(request_id, chain, device_blocks)
    return device_blocks


def committed(rig: Rig) -> list[bytes]:
    return [c.block_hash for c in rig.client.commits if c.outcome is CommitOutcome.READY]
