"""Offload and onboard planning shared by all engines; imports no engine."""

from kvtier.connector.copying import BlockCopier
from kvtier.connector.fingerprint import EngineFacts, namespace_of, weights_digest
from kvtier.connector.jobs import (
    FailReason,
    JobResult,
    OffloadJob,
    OnboardJob,
    StepOutcome,
    StepPlan,
)
from kvtier.connector.scheduler import SchedulerConnector
from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.stats import ConnectorStats
from kvtier.connector.worker import WorkerConnector

__all__ = [
    "BlockCopier",
    "ConnectorSettings",
    "ConnectorStats",
    "EngineFacts",
    "FailReason",
    "JobResult",
    "OffloadJob",
    "OnboardJob",
    "SchedulerConnector",
    "StepOutcome",
    "StepPlan",
    "WorkerConnector",
    "namespace_of",
    "weights_digest",
]
