"""The scheduler rig for models of several KV cache groups.

A device block belongs to one group at a time, and what a block should hold depends on its group.
The forward pass looks at all that it would read: in a window what the window reaches, no further.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import scheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvtier.connector.grouped import GroupedConnector
from kvtier.connector.vllm.facts import none_hash
from kvtier.connector.vllm.grouped_worker import GroupedWorkerSide
from kvtier.connector.vllm.groups import group_forms
from kvtier.connector.worker import WorkerConnector
from kvtier.namespace import NamespaceSpec
from tests.support.connector_rig import content_of
from tests.support.stepped_control import SteppedLane
from tests.vllm.scheduler_rig import BLOCK_TOKENS, JUNK, SchedulerRig


def full(block_tokens: int = BLOCK_TOKENS, *, eagle: bool = False) -> KVCacheGroupSpec:
    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=2, head_size=32, dtype=torch.bfloat16
    )
    return KVCacheGroupSpec([f"full{block_tokens}"], spec, is_eagle_group=eagle)


def window(tokens: int, block_tokens: int = BLOCK_TOKENS, *, eagle: bool = False) -> Any:
    spec = SlidingWindowSpec(
        block_size=block_tokens,
        num_kv_heads=2,
        head_size=32,
        dtype=torch.bfloat16,
        sliding_window=tokens,
    )
    return KVCacheGroupSpec([f"window{tokens}"], spec, is_eagle_group=eagle)


def local(tokens: int, block_tokens: int = BLOCK_TOKENS) -> KVCacheGroupSpec:
    spec = ChunkedLocalAttentionSpec(
        block_size=block_tokens,
        num_kv_heads=2,
        head_size=32,
        dtype=torch.bfloat16,
        attention_chunk_size=tokens,
    )
    return KVCacheGroupSpec([f"local{tokens}"], spec)


def two_groups() -> list[KVCacheGroupSpec]:
    return [window(40), full()]


@contextlib.contextmanager
def drafting(has_drafter: bool) -> Iterator[None]:
    """A scheduler made meanwhile keeps its blocks as for a drafter that is not there to be loaded.

    vLLM 0.33 goes by the configuration of the drafter, and not by the groups alone.
    """
    with pytest.MonkeyPatch.context() as patch:
        if has_drafter:
            patch.setattr(scheduler, "KVCacheManager", drafters_manager)
        yield


def drafters_manager(**given: Any) -> KVCacheManager:
    return KVCacheManager(**{**given, "use_eagle": True})


class Lanes:
    """Those of all groups, moved together."""

    def __init__(self, count: int) -> None:
        self.each = [SteppedLane() for _ in range(count)]

    def step(self, count: int = 1_000_000) -> None:
        for lane in self.each:
            lane.step(count)


@dataclass
class GroupedRig(SchedulerRig):
    """One engine; `lane` stands for the lanes of all groups."""

    groups: list[KVCacheGroupSpec] = field(default_factory=two_groups)

    def begin(self) -> None:
        self.config.cache_config.num_gpu_blocks = self.device_block_count
        self.kv_caches = KVCacheConfig(
            num_blocks=self.device_block_count, kv_cache_tensors=[], kv_cache_groups=self.groups
        )
        sizes = [group.kv_cache_spec.block_size for group in self.groups]
        self.forms = group_forms(self.kv_caches)
        self.hash_tokens = int(np.gcd.reduce(sizes))
        with drafting(any(group.is_eagle_group for group in self.groups)):
            self.scheduler = Scheduler(
                vllm_config=self.config,
                kv_cache_config=self.kv_caches,
                log_stats=True,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=int(np.lcm.reduce(sizes)),
                hash_block_size=self.hash_tokens,
            )
        self.connector = self.scheduler.connector
        self.side = self.connector._scheduler
        self.specs = [self._spec_of(form) for form in self.forms]
        self.core = GroupedConnector(
            self.client,
            self.specs,
            self.side.finder,
            hash_tokens=self.hash_tokens,
            settings=replace(
                self.settings,
                leased_blocks_max=self.device_block_count,
                may_offload=self.side._settings.may_offload,
            ),
            clock=self.clock,
            control=self.control,
        )
        self.side.begin_grouped(self.core, self.client)
        self.worker = GroupedWorkerSide(self.config, self.kv_caches, None)
        self.lane = Lanes(len(self.specs))
        workers = [
            WorkerConnector(
                self.worker_client,
                spec,
                self.copier,
                settings=self.settings,
                clock=self.clock,
                lane=lane,
            )
            for spec, lane in zip(self.specs, self.lane.each, strict=True)
        ]
        quiet = SimpleNamespace(close=lambda: None)
        self.worker.begin_grouped(self.specs, workers, [quiet])

    def _spec_of(self, form: Any) -> NamespaceSpec:
        return NamespaceSpec(
            model="m",
            weights="v1",
            kv_dtype="bfloat16",
            layout="x",
            block_tokens=form.block_tokens,
            shard_bytes=self.shard_bytes,
            hash_algorithm="sha256",
            hash_seed=none_hash("sha256").hex(),
            kv_group=form.name,
            chained=form.chained,
        )

    # ------------------------------------------------------------------------------- steps

    def _told(self, output: Any) -> Any:
        self.worker.start_behind()
        received = self.worker.take_received()
        failed = self.worker.take_failed()
        transfer = KVConnectorOutput(
            finished_recving=received or None,
            failed_recving=failed or None,
            kv_connector_worker_meta=self.worker.take_report(),
        )
        return self._sampled(output, transfer)

    def _forward(self, output: Any) -> None:
        """All write before any reads: a request may build on what another one fills here."""
        work = list(output.num_scheduled_tokens.items())
        for request_id, count in work:
            self._write(self.scheduler.requests[request_id], count)
        for request_id, count in work:
            self._check_reads(self.scheduler.requests[request_id], count)

    def _write(self, request: Request, count: int) -> None:
        tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        end = request.num_computed_tokens
        for number, form in enumerate(self.forms):
            size, table = form.block_tokens, tables[number]
            for index in range((end - count) // size, -(-end // size)):
                value: Any = JUNK
                if (index + 1) * size <= end:
                    value = self._content(number, self._name_of(request, number, index))
                if table[index]:
                    self.copier.blocks[table[index]] = value

    def _check_reads(self, request: Request, count: int) -> None:
        tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        begin = request.num_computed_tokens - count
        for number, form in enumerate(self.forms):
            first = self._skipped(number, begin) // form.block_tokens
            for index in range(first, begin // form.block_tokens):
                block = tables[number][index]
                where = f"{request.request_id} builds on wrong KV: group {number}, block {index}"
                assert block, f"{where}: it is missing"
                wanted = self._content(number, self._name_of(request, number, index))
                assert np.array_equal(self.copier.blocks[block], wanted), where

    def _skipped(self, number: int, tokens: int) -> int:
        coordinator = self.scheduler.kv_cache_manager.coordinator
        return int(coordinator.single_type_managers[number].get_num_skipped_tokens(tokens))

    def _name_of(self, request: Request, number: int, index: int) -> bytes:
        factor = self.forms[number].block_tokens // self.hash_tokens
        return self._hash_of(request, (index + 1) * factor - 1)

    def _content(self, number: int, name: bytes) -> Any:
        return content_of(name + bytes([number]), weights=self.weights)

    def _check_resident(self) -> None:
        for number, group in enumerate(self.core._onboarder.groups):
            namespace = group.namespace
            known = self._weights.setdefault((namespace, namespace.epoch), self.weights)
            for name, slot in namespace.resident.items():
                wanted = content_of(name + bytes([number]), weights=known)
                assert np.array_equal(self.client.memory[0][slot], wanted), f"wrong KV: {slot}"
