"""The reference engine on a fake GPU with all of kvtier's connector: only the daemon is played.

The copying thread's steps are made by the engine's thread while it waits for tokens and pauses, and
where there is a seed, also between the launches of a step: how many and when is chance.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvtier.connector import (
    ConnectorSettings,
    JobResult,
    SchedulerConnector,
    StepPlan,
    WorkerConnector,
)
from kvtier.connector.stream_lane import StreamLane
from kvtier.cuda.fake import FakeCudart
from kvtier.engine.config import EngineConfig
from kvtier.engine.connector_api import EngineConnector
from kvtier.engine.engine import Engine
from kvtier.engine.hashing import HashChain
from kvtier.engine.kv_cache import namespace_spec
from kvtier.engine.model import LlamaModel
from kvtier.policy.load_or_recompute import OnboardWish
from kvtier.types import CommitOutcome, Worth
from tests.support.clock import ManualClock
from tests.support.copy_watch import CopyWatch
from tests.support.fake_client import FakeClient, FakeNamespace
from tests.support.fake_gpu import FakeGpu
from tests.support.stepped_control import SteppedControl

SETTINGS = ConnectorSettings(
    stock_blocks=64,
    onboard=OnboardWish.ALWAYS,
    onboard_wait_seconds=1.0,
    finish_wait_seconds=10.0,
    holds_preempted_blocks=True,
    raise_internal_errors=True,
    # A fake's steps teach nothing about the offloads beside them.
    offload_stretch_max=0.0,
)


class WatchedClient(FakeClient):
    """Says what others may do from a call on: read what is committed, write to what is released."""

    def __init__(self, *, slot_count: int, shard_bytes: int) -> None:
        self.clock = ManualClock()
        super().__init__(self.clock, slot_count=slot_count, shard_bytes=shard_bytes)
        self.cuda = FakeCudart()

    def commit(
        self, namespace: FakeNamespace, hashes: Sequence[bytes], slots: Sequence[int], **others: Any
    ) -> list[CommitOutcome]:
        self.cuda.host_reads(*map(self._range_of, slots), name="another engine's read")
        return super().commit(namespace, hashes, slots, **others)

    def release(self, leases: Sequence[Any], worth: Worth | None = None) -> int:
        slots = {slot for lease in leases for slot in self.leases.get(lease.lease_id, [])}
        released_count = super().release(leases, worth)
        slots.difference_update(*self.leases.values())
        self.cuda.host_writes(*map(self._range_of, slots), name="another engine's write")
        return released_count

    def _range_of(self, slot: int) -> tuple[int, int]:
        view = self.memory[0][slot]
        return int(view.ctypes.data), view.nbytes


class WatchedWorker(WorkerConnector):
    """Compares the bytes of every copy that ends."""

    watch: CopyWatch

    def start(self, plan: StepPlan) -> None:
        self.watch.note_start(plan)
        super().start(plan)

    def poll(self) -> list[JobResult]:
        results = super().poll()
        for result in results:
            assert not self.watch.differing(result), "a copy moved other bytes"
        return results


class GpuBench:
    """One engine; another bench may go on with the client of one that is closed."""

    def __init__(
        self,
        model: LlamaModel,
        config: EngineConfig,
        *,
        client: WatchedClient | None = None,
        slot_count: int = 128,
        seed: int | None = None,
        gpu: FakeGpu | None = None,
        settings: ConnectorSettings = SETTINGS,
    ) -> None:
        spec = namespace_spec(model, config)
        self.gpu = gpu or FakeGpu(model, config, seed=seed)
        self.cuda = self.gpu.cuda
        self.client = client or WatchedClient(slot_count=slot_count, shard_bytes=spec.shard_bytes)
        self.client.cuda = self.cuda
        self.clock = self.client.clock
        self._random = random.Random(seed) if seed is not None else None
        control = SteppedControl()
        control.is_eager = True
        self.scheduler = SchedulerConnector(
            self.client, spec, settings=settings, clock=self.clock, control=control
        )
        self.blocks = self.gpu.make_blocks(settings)
        self.lane = StreamLane(self.blocks.streams, threaded=False)
        self.worker = WatchedWorker(
            self.client, spec, self.blocks, settings=settings, clock=self.clock, lane=self.lane
        )
        self.worker.watch = CopyWatch(self.gpu, self.client.memory[0])
        self.gpu.meanwhile = self._copy
        if self._random is not None:  # Else what others do would cost the engine's thread its time.
            self.gpu.before_launch = self._copy
        self.namespace = self.client.open_namespace(spec)
        self.engine = Engine(
            model,
            config,
            EngineConnector(self.scheduler, self.worker),
            device=self.gpu,
            clock=self.clock,
            pause=self._pause,
        )

    def fill(self, prompt: Sequence[int]) -> None:
        """As if another engine had offloaded the prompt's blocks; their bytes do not matter."""
        config = self.engine.config
        chain = HashChain(seed=config.hash_seed, block_tokens=config.block_tokens)
        chain.extend(prompt)
        parent = None
        for block_hash in chain.hashes:
            self.namespace.resident[block_hash] = self.client.free.pop()
            self.namespace.parents[block_hash] = parent
            parent = block_hash

    def close(self) -> None:
        """Whatever was done, nothing of it may have been a race, or have waited for the device."""
        assert self.engine.wait_offloads(1.0)
        assert self.engine.check_invariants() == []
        assert self.engine.scheduler.pool.free_count == self.engine.config.device_block_count
        assert self.cuda.synchronize_count == 0, "somebody waited for the device"
        self.worker.close()
        self.scheduler.close()
        assert self.client.violations == []
        assert self.client.open_hold_count == 0
        assert self.client.pins is not None
        assert self.client.pins.give_up(int(self.client.memory.ctypes.data))
        self.cuda.assert_clean()

    def _copy(self) -> None:
        if self._random is None or self._random.random() < 0.3:
            self.lane.step()

    def _pause(self, seconds: float) -> None:
        self.clock.advance(seconds)
        if self._random is None:
            self.lane.step()
            self.cuda.advance(seconds)
            return
        for _ in range(4):
            self._copy()
            self.cuda.advance(50e-6)
