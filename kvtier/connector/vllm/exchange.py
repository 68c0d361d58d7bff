"""What travels between vLLM's scheduler process and its workers: picklable, and marked as vLLM's.

Down with every step a `StepOrder`, up with every step that has something to tell a `WorkerReport`,
and once, before the first step, a `Handshake` from each worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtier.connector.jobs import JobResult, StepPlan
from kvtier.connector.sharding import Place
from kvtier.namespace import NamespaceSpec


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker knows its tensors and weights; the scheduler side asks for nothing before it has
    this of every rank."""

    spec: NamespaceSpec  # Of the rank's own shard alone.
    place: Place = Place()
    machine: str = ""  # Ranks on several have no daemon in common.
    groups: tuple[NamespaceSpec, ...] = ()  # Of a hybrid model, in vLLM's order.


@dataclass(frozen=True)
class UnstartedLoad:
    """A load that vLLM waits for and that no worker was told of: it has failed."""

    request_id: str
    device_blocks: tuple[int, ...]


@dataclass
class StepOrder(KVConnectorMetadata):  # type: ignore[misc]
    """One step's copies, and what must have ended before its forward pass."""

    plan: StepPlan | None  # None: nothing is planned yet, or ever.
    # Offloads of earlier steps that read device blocks which this step overwrites.
    fenced_jobs: tuple[int, ...] = ()
    unstarted: tuple[UnstartedLoad, ...] = ()
    token_count: int = 0  # That the step computes.
    # Of a hybrid model, by group; their offloads begin behind the step's forward pass.
    group_plans: tuple[StepPlan, ...] = ()


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The jobs that ended on a worker, or on several.

    The first one brings the handshake once more: vLLM's MultiConnector passes on one alone, of
    whichever of its connectors comes first.
    """

    results: list[JobResult] = field(default_factory=list)
    handshakes: list[Handshake] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport), "reports of two connectors were mixed up"
        return WorkerReport(self.results + other.results, self.handshakes + other.handshakes)
