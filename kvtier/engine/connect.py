"""Puts an engine on kvtier: one KV tensor, both halves of the connector, closed in order.

The only module that knows the connector's classes, and it imports them when called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtier.engine.config import EngineConfig
from kvtier.engine.connector_api import EngineConnector
from kvtier.engine.device import EngineDevice, open_device
from kvtier.engine.engine import Engine
from kvtier.engine.kv_cache import namespace_spec
from kvtier.engine.model import LlamaModel
from kvtier.namespace import NamespaceSpec
from kvtier.policy.load_or_recompute import OnboardWish

if TYPE_CHECKING:
    from kvtier.client import Client
    from kvtier.connector import ConnectorSettings, SchedulerConnector, WorkerConnector

# How long an engine that is shut down waits for what it has computed to reach kvtier.
OFFLOAD_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class ConnectedEngine:
    """An engine and its connector; the client stays the caller's."""

    engine: Engine
    spec: NamespaceSpec
    client: Client
    scheduler: SchedulerConnector
    worker: WorkerConnector

    def wait_ready(self, timeout_seconds: float) -> bool:
        """Whether the daemon has opened the namespace by then; the engine runs in any case."""
        if not self.client.wait_connected(timeout_seconds):
            return False
        namespace = self.client.open_namespace(self.spec)
        return self.client.wait_namespace(namespace, timeout_seconds)


@contextmanager
def connected_engine(
    model: LlamaModel,
    config: EngineConfig,
    client: Client,
    *,
    salt: str = "",
    settings: ConnectorSettings | None = None,
    device: EngineDevice | None = None,
) -> Iterator[ConnectedEngine]:
    """An engine that offloads to and onboards from the client's daemon, whenever there is one.

    Without `settings` all that is there is loaded; of the preempted the engine has its own rule.

    `device`: where it computes, if not on what `config.device` names. Raises CudaUnavailable for
    one that is not to be had.
    """
    from kvtier.connector import ConnectorSettings, SchedulerConnector, WorkerConnector

    # This scheduler keeps a preempted request's blocks until copies let them go.
    settings = settings or ConnectorSettings(onboard=OnboardWish.ALWAYS)
    settings = replace(settings, holds_preempted_blocks=True)
    spec = namespace_spec(model, config, salt=salt)
    device = device or open_device(model, config)
    blocks = device.make_blocks(settings)
    with ExitStack() as held:  # The worker side is closed first: it still reports its copies.
        scheduler = SchedulerConnector(client, spec, settings=settings)
        held.callback(scheduler.close)
        worker = WorkerConnector(client, spec, blocks, settings=settings)
        held.callback(worker.close)
        engine = Engine(model, config, EngineConnector(scheduler, worker), device=device)
        yield ConnectedEngine(engine, spec, client, scheduler, worker)
        engine.wait_offloads(OFFLOAD_SECONDS_MAX)
