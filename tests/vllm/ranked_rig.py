"""The scheduler rig with two ranks, each with a shard, whose copies end at different times.

What they tell is put together by vLLM's own aggregator. Both compute the same bytes, each into its
own device blocks: a shard that was not written, or overwritten, shows all the same.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import ModelRunnerOutput

from kvtier.connector.scheduler import SchedulerConnector
from kvtier.connector.sharding import Place
from kvtier.connector.vllm.ranks import Reports
from kvtier.connector.vllm.worker_side import WorkerSide
from kvtier.connector.worker import WorkerConnector
from tests.support.clock import ManualClock
from tests.support.connector_rig import DeviceCopier
from tests.support.stepped_control import SteppedControl, SteppedLane
from tests.vllm.scheduler_rig import EngineClient, SchedulerRig, told_by

RANKS = 2


class RankedRig(SchedulerRig):
    """`copier`, `lane` and `worker` are the first rank's; `copiers`, `lanes`, `workers` all."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.device_block_count)
        self.aggregator = KVOutputAggregator(RANKS)
        super().__post_init__()

    def connect(self) -> None:
        self.clock = ManualClock()
        self.client = self.worker_client = EngineClient(
            self.clock,
            slot_count=self.slot_count,
            shard_bytes=self.shard_bytes,
            shard_count=RANKS,
        )
        self.control, self.lane = SteppedControl(), SteppedLane()

    def begin(self) -> None:
        super().begin()
        self.spec = replace(self.spec, shard_count=RANKS)
        settings = replace(
            self.settings,
            leased_blocks_max=self.device_block_count,
            may_offload=self.side._settings.may_offload,
            worker_count=RANKS,
        )
        self.control = SteppedControl()
        self.core = SchedulerConnector(
            self.client, self.spec, settings=settings, clock=self.clock, control=self.control
        )
        places = tuple(Place(rank, RANKS, rank) for rank in range(RANKS))
        self.side._rank_count, self.side._reports = RANKS, Reports(RANKS)
        self.side.begin(self.core, self.client, self.spec, places)
        self.copiers = [self.copier, DeviceCopier(self.device_block_count)]
        self.lanes = [SteppedLane() for _ in places]
        self.workers = [self._worker_at(place) for place in places]
        self.lane, self.worker = self.lanes[0], self.workers[0]

    def _worker_at(self, place: Place) -> WorkerSide:
        side = WorkerSide(self.config, None, None)  # type: ignore[arg-type]
        worker = WorkerConnector(
            self.client,
            self.spec,
            self.copiers[place.rank],
            place=place,
            settings=self.settings,
            clock=self.clock,
            lane=self.lanes[place.rank],
        )
        side.begin(worker, None, self.spec)
        return side

    def _start(self, order: Any) -> None:
        for worker in self.workers:
            worker.fence(order)
            worker.start(order)

    def _told(self, output: Any) -> ModelRunnerOutput:
        told = [self._sampled(output, told_by(worker)) for worker in self.workers]
        whole = self.aggregator.aggregate(told)
        assert whole is not None
        return whole

    def _copy(self) -> None:
        """Ranks are not equally fast."""
        for lane in self.random.sample(self.lanes, self.random.randint(1, RANKS)):
            lane.step()

    def _forward(self, output: Any) -> None:
        first = self.copier
        for copier in self.copiers:
            self.copier = copier
            super()._forward(output)
        self.copier = first
