"""The half of the connector in a worker: starts a step's copies and tells which have ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvtier.client import Client
from kvtier.connector.copying import BlockCopier
from kvtier.connector.jobs import JobResult
from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.sharding import Place
from kvtier.connector.stream_copying import DeviceBlocks
from kvtier.connector.vllm.copier import cpu_copier
from kvtier.connector.vllm.device import device_blocks, memory_node
from kvtier.connector.vllm.exchange import Handshake, StepOrder, WorkerReport
from kvtier.connector.vllm.facts import namespace_of_engine
from kvtier.connector.vllm.geometry import BlockGeometry, geometry_of
from kvtier.connector.vllm.identity import engine_id_of, machine_id
from kvtier.connector.vllm.options import CLIENT_SETTINGS, Options
from kvtier.connector.vllm.ranks import place_of_this_rank
from kvtier.connector.vllm.unsupported import Unsupported
from kvtier.connector.worker import WorkerConnector
from kvtier.namespace import NamespaceSpec
from kvtier.types import Role

log = logging.getLogger(__name__)


class WorkerSide:
    """Every load that a step brought is told to vLLM once as received, whatever came of it."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._spec: NamespaceSpec | None = None
        self._client: Any = None
        self._worker: WorkerConnector | None = None
        # Makes it, where the namespace is known with the first plan only: it takes all ranks.
        self._make_worker: Callable[[NamespaceSpec], WorkerConnector] | None = None
        self._place = Place()
        self._loads: dict[int, tuple[str, tuple[int, ...]]] = {}  # Request and blocks, by job.
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._results: list[JobResult] = []
        self._has_reported = False

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Learn the tensors, and connect; the daemon may come later."""
        config = self._kv_cache_config
        geometry = geometry_of(kv_caches, config.num_blocks)
        copier = copier_of(geometry, kv_caches, self._options.settings)
        spec = namespace_of_engine(self._vllm_config, config, geometry, self._options)
        place = place_of_this_rank(self._vllm_config, config)
        name = "vllm worker" if place.rank_count == 1 else f"vllm worker {place.rank}"
        client = worker_client(self._vllm_config, self._options, place, kv_caches, name)

        def make_worker(whole: NamespaceSpec) -> WorkerConnector:
            log.info(
                "kvtier: %d bytes a block of %d tokens, %d device blocks, namespace %s",
                geometry.shard_bytes,
                whole.block_tokens,
                geometry.block_count,
                whole.fingerprint().hex(),
            )
            return WorkerConnector(
                client,
                whole,
                copier,
                place=place,
                shard_bytes=geometry.shard_bytes,
                settings=self._options.settings,
            )

        self._client, self._spec, self._place = client, spec, place
        self._make_worker = make_worker
        if place.rank_count == 1:
            self._worker = make_worker(spec)

    def begin(self, worker: WorkerConnector, client: Any, spec: NamespaceSpec) -> None:
        """Copy with these from now on."""
        self._worker, self._client, self._spec = worker, client, spec

    def handshake(self) -> Handshake | None:
        return None if self._spec is None else Handshake(self._spec, self._place, machine_id())

    def fence(self, order: StepOrder) -> None:
        """Before this step writes: no copy reads what it overwrites."""
        if order.fenced_jobs and self._worker is not None:
            self._worker.withdraw(order.fenced_jobs)

    def start(self, order: StepOrder) -> None:
        """Queue the step's copies; returns at once."""
        for load in order.unstarted:
            self._received.add(load.request_id)
            self._bad_blocks.update(load.device_blocks)
        plan = order.plan
        if self._worker is None and plan is not None and self._make_worker is not None:
            self._worker = self._make_worker(plan.spec)
        if self._worker is None:
            return
        self._worker.note_step(order.token_count)
        if plan is None or (
            plan.spec == self._worker.spec and not (plan.onboards or plan.offloads)
        ):
            return
        for job in plan.onboards:
            self._loads[job.job_id] = (job.request_id, job.device_blocks)
        self._worker.start(plan)

    def start_behind(self) -> None:
        """The step's forward pass is queued: everything was started before it."""

    def take_failed(self) -> set[str]:
        """Requests whose loads failed, told as such; here it is told of their blocks."""
        return set()

    def take_received(self) -> set[str]:
        """Requests whose loads have ended since the last call, well or not."""
        results = [] if self._worker is None else self._worker.poll()
        for result in results:
            load = self._loads.pop(result.job_id, None)
            if load is None:
                continue
            request_id, device_blocks = load
            self._received.add(request_id)
            if result.failed is not None:
                # All of them: a load that ended too late may have read anything.
                self._bad_blocks.update(device_blocks)
                log.warning(
                    "kvtier: a load of request %s failed (%s): %s",
                    request_id,
                    result.failed,
                    result.message,
                )
        self._results += results
        received, self._received = self._received, set()
        return received

    def take_bad_blocks(self) -> set[int]:
        """The device blocks of failed loads; told no later than their requests."""
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        return bad_blocks

    def take_report(self) -> WorkerReport | None:
        results, self._results = self._results, []
        handshake = None if self._has_reported else self.handshake()
        self._has_reported = True
        handshakes = [] if handshake is None else [handshake]
        return WorkerReport(results, handshakes) if results or handshakes else None

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._client is not None:
            self._client.close()


def worker_client(
    vllm_config: Any,
    options: Options,
    place: Place,
    kv_caches: Mapping[str, torch.Tensor],
    name: str,
) -> Client:
    device = next(iter(kv_caches.values())).device
    return Client(
        options.socket,
        settings=CLIENT_SETTINGS,
        engine_id=engine_id_of(vllm_config),
        role=Role.WORKER,
        shards=(place.shard,),
        name=name,
        memory_node=memory_node(device),
        maps_segments=device.type == "cpu",  # Else they would have to be pinned.
    )


def copier_of(
    geometry: BlockGeometry, kv_caches: Mapping[str, torch.Tensor], settings: ConnectorSettings
) -> BlockCopier | DeviceBlocks:
    """Raises Unsupported for devices that nobody copies from here."""
    devices = {tensor.device for tensor in kv_caches.values()}
    kinds = sorted({device.type for device in devices})
    if kinds == ["cpu"]:
        return cpu_copier(geometry)
    if kinds == ["cuda"] and len(devices) == 1:
        return device_blocks(geometry, devices.pop(), settings)
    raise Unsupported(
        f"kvtier: KV on {'+'.join(sorted(map(str, devices)))} is not supported; run without kvtier"
    )
