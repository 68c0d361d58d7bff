"""vLLM's real Scheduler with our connector, and everything around it moved by hand.

No model: the forward pass writes into each full device block what its hash stands for, and before
that looks whether the blocks it builds on hold what their hashes stand for. The daemon is the fake
one of the planning's own tests; calls and copies happen when a test says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtier.connector import ConnectorSettings, SchedulerConnector, WorkerConnector
from kvtier.connector.vllm.facts import none_hash
from kvtier.connector.vllm.worker_side import WorkerSide
from kvtier.namespace import NamespaceSpec
from kvtier.policy.load_or_recompute import OnboardWish
from tests.support.clock import ManualClock
from tests.support.connector_rig import SHARD_BYTES, DeviceCopier, content_of
from tests.support.fake_client import FakeClient
from tests.support.stepped_control import SteppedControl, SteppedLane

BLOCK_TOKENS = 16
SETTINGS = ConnectorSettings(
    onboard=OnboardWish.ALWAYS, stock_blocks=32, raise_internal_errors=True
)
JUNK = 0xEE


def transfer_config(role: str = "kv_both", policy: str = "recompute", **extra: Any) -> Any:
    return KVTransferConfig(
        kv_connector="KVTierConnector",
        kv_connector_module_path="kvtier.connector.vllm",
        kv_role=role,
        kv_load_failure_policy=policy,
        kv_connector_extra_config={f"kvtier.{name}": value for name, value in extra.items()},
    )


def vllm_config(model: Path, transfer: Any, **scheduling: Any) -> VllmConfig:
    options = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "enable_chunked_prefill": True,
        "is_encoder_decoder": False,
    }
    return VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="bfloat16", seed=0, max_model_len=512),
        scheduler_config=SchedulerConfig(**(options | scheduling)),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
    )


def kv_cache_config(device_block_count: int) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.bfloat16
    )
    return KVCacheConfig(
        num_blocks=device_block_count,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer0"], spec)],
    )


def prompt_of(token_count: int, *, seed: int = 0, shared: int = 0) -> list[int]:
    """Equal first `shared` tokens for all seeds."""
    return [4 + (i * 37 + (seed * 101 if i >= shared else 0)) % 500 for i in range(token_count)]


class EngineClient(FakeClient):
    """The fake, as the side that closes its own client sees it."""

    def close(self) -> None:
        self.disconnect()


@dataclass
class SchedulerRig:
    """One engine; `step` is one step of it."""

    shard_bytes: ClassVar[int] = SHARD_BYTES
    hash_tokens: ClassVar[int] = BLOCK_TOKENS

    model: Path
    device_block_count: int = 64
    slot_count: int = 128
    transfer: Any = field(default_factory=transfer_config)
    scheduling: dict[str, Any] = field(default_factory=dict)
    settings: ConnectorSettings = SETTINGS

    def __post_init__(self) -> None:
        init_none_hash(sha256)
        self.copier = DeviceCopier(self.device_block_count)
        self.config = vllm_config(self.model, self.transfer, **self.scheduling)
        self.weights = "v1"
        self._weights: dict[tuple[Any, int], str] = {}  # By namespace and epoch.
        self.finished: list[str] = []
        self.orders: list[Any] = []
        self.connect()
        self.begin()

    def connect(self) -> None:
        """What is between the engine and the daemon, and the daemon."""
        self.clock: Any = ManualClock()
        self.client: Any = EngineClient(
            self.clock, slot_count=self.slot_count, shard_bytes=self.shard_bytes
        )
        self.worker_client: Any = self.client
        self.control: Any = SteppedControl()
        self.lane: Any = SteppedLane()

    def begin(self) -> None:
        """A new start of the engine, on the daemon as it is."""
        self.config.cache_config.num_gpu_blocks = self.device_block_count
        kv_caches = kv_cache_config(self.device_block_count)
        self.scheduler = self._scheduler_class()(
            vllm_config=self.config,
            kv_cache_config=kv_caches,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
        )
        self.attach(kv_caches)

    def attach(self, kv_caches: KVCacheConfig) -> None:
        """Give both sides of the scheduler's connector what is between them and the daemon."""
        self.connector = self.scheduler.connector
        self.side = self.connector._scheduler
        self.spec = NamespaceSpec(
            model="m",
            weights="v1",
            kv_dtype="bfloat16",
            layout="x",
            block_tokens=BLOCK_TOKENS,
            shard_bytes=self.shard_bytes,
            hash_algorithm="sha256",
            hash_seed=none_hash("sha256").hex(),
        )
        self.core = SchedulerConnector(
            self.client,
            self.spec,
            settings=replace(
                self.settings,
                leased_blocks_max=self.device_block_count,
                may_offload=self.side._settings.may_offload,
            ),
            clock=self.clock,
            control=self.control,
        )
        self.side.begin(self.core, self.client, self.spec)
        self.worker = WorkerSide(self.config, kv_caches, None)
        worker = WorkerConnector(
            self.worker_client,
            self.spec,
            self.copier,
            settings=self.settings,
            clock=self.clock,
            lane=self.lane,
        )
        self.worker.begin(worker, SimpleNamespace(close=lambda: None), self.spec)

    def _scheduler_class(self) -> type[Scheduler]:
        return Scheduler

    # ------------------------------------------------------------------------------- requests

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        tokens: int = 4,
        facts: dict[str, Any] | None = None,
        **wishes: Any,
    ) -> Request:
        """`facts`: what else vLLM's Request takes, such as an adapter."""
        extra = {"kv_transfer_params": wishes} if wishes else None
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, extra_args=extra)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=get_request_block_hasher(self.hash_tokens, sha256),
            **(facts or {}),
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    # ------------------------------------------------------------------------------- steps

    def step(self, *, answers: bool = True, copies: bool = True, early: bool = False) -> Any:
        """One step; `answers`: the daemon's to what was asked; `copies`: all copies end in it.

        `early`: those that the step brings are made before its forward pass.
        """
        output = self.scheduler.schedule()
        order = output.kv_connector_metadata
        self.orders.append(order)
        self._start(order)
        if early:
            self._copy()
        self._forward(output)
        if copies:
            self._copy()
        told = self._told(output)
        outputs = self.scheduler.update_from_output(output, told)
        for out in outputs.values():
            self.finished += [o.request_id for o in out.outputs if o.finish_reason is not None]
        if answers:
            self._answer()
        self._pass_time()
        self._check_resident()
        return output

    def run(self, limit: int = 400) -> None:
        """Until nothing is left to do for vLLM or for us."""
        for _ in range(limit):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps: {self.core.stats()}")

    def restart(self) -> None:
        """The engine ends well and starts again with empty device blocks."""
        self.scheduler.shutdown()
        self.lane.step()
        self.copier.blocks[:] = JUNK
        self.client.reconnect()
        self.client.quiet()
        self.control = SteppedControl()
        self.lane = SteppedLane()
        self.begin()

    def computed_tokens(self, output: Any) -> int:
        return int(output.total_num_scheduled_tokens)

    def _start(self, order: Any) -> None:
        self.worker.fence(order)
        self.worker.start(order)

    def _told(self, output: Any) -> ModelRunnerOutput:
        """What the engine hears of its workers."""
        return self._sampled(output, told_by(self.worker))

    def _copy(self) -> None:
        self.lane.step()

    def _answer(self) -> None:
        self.control.step()
        self.control.begin_waits()
        self.control.end_waits()

    def _pass_time(self) -> None:
        self.clock.advance(0.001)

    def _forward(self, output: Any) -> None:
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            table = self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            end = request.num_computed_tokens  # Advanced by schedule() already.
            first_block, whole = (end - count) // BLOCK_TOKENS, end // BLOCK_TOKENS
            for index in range(first_block):
                self._check_block(request, index, table[index])
            for index in range(first_block, -(-end // BLOCK_TOKENS)):
                value = JUNK
                if index < whole:
                    value = content_of(self._hash_of(request, index), weights=self.weights)
                self.copier.blocks[table[index]] = value

    def _hash_of(self, request: Request, index: int) -> bytes:
        """As the daemon knows it: an adapter's blocks have hashes of their own there."""
        tracked = self.side._requests.get(request.request_id)
        hashes = request.block_hashes if tracked is None else tracked.hashes
        assert index < len(hashes), "a block without a hash"  # An adapter's are made when asked.
        return bytes(hashes[index])

    def _check_block(self, request: Request, index: int, device_block: int) -> None:
        wanted = content_of(self._hash_of(request, index), weights=self.weights)
        found = self.copier.blocks[device_block]
        assert np.array_equal(found, wanted), (
            f"{request.request_id} builds on wrong KV: its block {index}, {device_block}"
        )

    def _check_resident(self) -> None:
        """What the daemon holds is what was computed, under the weights of its namespace."""
        current = self.core._desk.namespace
        self._weights.setdefault((current, current.epoch), self.weights)
        for namespace in self.client.namespaces.values():
            weights = self._weights.get((namespace, namespace.epoch))
            for block_hash, slot in namespace.resident.items():
                wanted = content_of(block_hash, weights=weights or self.weights)
                for shard in self.client.memory:
                    assert np.array_equal(shard[slot], wanted), f"wrong KV is in slot {slot}"

    def _sampled(self, output: Any, transfer: KVConnectorOutput) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        tokens = [self._sampled_tokens(output, requests[request_id]) for request_id in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            kv_connector_output=transfer,
        )

    def _sampled_tokens(self, output: Any, request: Request) -> list[int]:
        is_sampled = request.num_computed_tokens >= request.num_tokens
        return [self.next_token(request.all_token_ids)] if is_sampled else []

    @staticmethod
    def next_token(tokens: Sequence[int]) -> int:
        """What is sampled after these; equal sequences go on equally."""
        return 4 + hashlib.sha256(repr(list(tokens[-8:])).encode()).digest()[0]

    # ------------------------------------------------------------------------------- checks

    def check_nothing_left(self) -> None:
        """Once everything has ended: no block, lease, slot or memory of a request anywhere."""
        for _ in range(3):  # Answers that came after the last step.
            self.control.step()
            self.core.on_results(())
        scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        assert not scheduler.requests
        assert not scheduler.running
        assert len(scheduler.waiting) == 0
        assert not scheduler.finished_recving_kv_req_ids
        assert not scheduler.failed_recving_kv_req_ids
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            assert not manager.req_to_blocks
        assert pool.get_num_free_blocks() == self.device_block_count - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
        assert not self.side._requests
        assert not self.side._loading
        assert not self.side._untold
        assert self.side._reuse.is_idle
        assert not self.side.has_work
        assert self.core.request_count == 0
        assert self.core.lease_count == 0
        assert not self.client.leases
        assert len(self.client.reserved) == self.core.stock_count
        assert self.client.violations == []
        assert self.core.check_invariants() == []


def told_by(worker: WorkerSide) -> KVConnectorOutput:
    """One worker's part of a step's output."""
    received = worker.take_received()
    return KVConnectorOutput(
        finished_recving=received or None,
        invalid_block_ids=worker.take_bad_blocks(),
        kv_connector_worker_meta=worker.take_report(),
    )


def with_settings(**settings: Any) -> ConnectorSettings:
    return replace(SETTINGS, **settings)
