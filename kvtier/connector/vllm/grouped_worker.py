"""The worker's half for models of several KV cache groups: a copier and a session for each.

A load has ended when the jobs of all its groups have. What fails is told by request: with several
groups vLLM cannot be told of single blocks. Offloads begin behind the step's forward pass, which
fills the blocks that they read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from kvtier.connector.jobs import FailReason, JobResult, OffloadJob, StepPlan
from kvtier.connector.sharding import Place
from kvtier.connector.vllm.exchange import Handshake, StepOrder
from kvtier.connector.vllm.facts import namespace_of_group
from kvtier.connector.vllm.geometry import geometry_of
from kvtier.connector.vllm.groups import group_forms
from kvtier.connector.vllm.identity import machine_id
from kvtier.connector.vllm.options import Options
from kvtier.connector.vllm.worker_side import WorkerSide, copier_of, worker_client
from kvtier.connector.worker import WorkerConnector
from kvtier.namespace import NamespaceSpec

log = logging.getLogger(__name__)


class GroupedWorkerSide(WorkerSide):
    """Invariant as its parent's."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        super().__init__(vllm_config, kv_cache_config, options)
        self._specs: tuple[NamespaceSpec, ...] = ()
        self._workers: list[WorkerConnector] = []
        self._clients: list[Any] = []
        self._open_loads: dict[str, set[int]] = {}  # Jobs that have not ended, by request.
        self._bad_loads: set[str] = set()  # Of these, some job has failed.
        self._failed: set[str] = set()
        # By group, the offloads of the step that is being computed.
        self._behind: tuple[StepPlan, ...] = ()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        specs, workers, clients = [], [], []
        config = self._kv_cache_config
        for form in group_forms(config):
            named = {name: kv_caches[name] for name in form.layer_names if name in kv_caches}
            geometry = geometry_of(named, config.num_blocks)
            copier = copier_of(geometry, named, self._options.settings)
            spec = namespace_of_group(self._vllm_config, config, geometry, self._options, form)
            # A client of its own: what it maps is what this group's copies know of.
            client = worker_client(
                self._vllm_config, self._options, Place(), kv_caches, f"vllm worker, {form.number}"
            )
            worker = WorkerConnector(client, spec, copier, settings=self._options.settings)
            log.info(
                "kvtier: group %s: %d bytes a block of %d tokens, namespace %s",
                form.name,
                geometry.shard_bytes,
                spec.block_tokens,
                spec.fingerprint().hex(),
            )
            specs.append(spec)
            workers.append(worker)
            clients.append(client)
        self.begin_grouped(specs, workers, clients)

    def begin_grouped(
        self, specs: list[NamespaceSpec], workers: list[WorkerConnector], clients: list[Any]
    ) -> None:
        """Copy with these from now on."""
        self._specs, self._workers, self._clients = tuple(specs), workers, clients
        self._spec = specs[0]

    def handshake(self) -> Handshake | None:
        if not self._specs:
            return None
        return Handshake(self._specs[0], Place(), machine_id(), self._specs)

    def fence(self, order: StepOrder) -> None:
        if order.fenced_jobs:
            for worker in self._workers:
                worker.withdraw(order.fenced_jobs)

    def start(self, order: StepOrder) -> None:
        """Queue the step's loads; its offloads wait for `start_behind`."""
        for plan in self._behind:  # vLLM went on without a word; their blocks may be others' now.
            self._results += [_withdrawn(job) for job in plan.offloads]
        self._behind = order.group_plans
        for load in order.unstarted:
            self._received.add(load.request_id)
            self._failed.add(load.request_id)
        for worker, plan in zip(self._workers, order.group_plans, strict=False):
            worker.note_step(order.token_count)
            for job in plan.onboards:
                self._loads[job.job_id] = (job.request_id, job.device_blocks)
                self._open_loads.setdefault(job.request_id, set()).add(job.job_id)
            if plan.onboards or plan.spec != worker.spec:
                worker.start(StepPlan(plan.spec, plan.onboards))

    def start_behind(self) -> None:
        behind, self._behind = self._behind, ()
        for worker, plan in zip(self._workers, behind, strict=False):
            if plan.offloads:
                worker.start(StepPlan(plan.spec, (), plan.offloads))

    def take_received(self) -> set[str]:
        for worker in self._workers:
            for result in worker.poll():
                self._results.append(result)
                self._note_result(result)
        received, self._received = self._received, set()
        return received

    def take_failed(self) -> set[str]:
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        for client in self._clients:
            client.close()

    def _note_result(self, result: JobResult) -> None:
        load = self._loads.pop(result.job_id, None)
        if load is None:
            return
        request_id, _ = load
        if result.failed is not None:
            self._bad_loads.add(request_id)
            log.warning(
                "kvtier: a load of request %s failed (%s): %s",
                request_id,
                result.failed,
                result.message,
            )
        open_jobs = self._open_loads[request_id]
        open_jobs.discard(result.job_id)
        if not open_jobs:
            del self._open_loads[request_id]
            self._received.add(request_id)
            if request_id in self._bad_loads:
                self._bad_loads.discard(request_id)
                self._failed.add(request_id)


def _withdrawn(job: OffloadJob) -> JobResult:
    return JobResult(job.job_id, Place().shard, FailReason.WITHDRAWN)
