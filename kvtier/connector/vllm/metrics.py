"""What vLLM shows of kvtier: on its own /metrics, and in its log lines.

Counts are made where the planning is, in the scheduler's process; they travel as plain data to the
process that serves /metrics, each step's increase by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

PREFIX = "vllm:kvtier_"
# From a copy of one block to a wait for a slow disk.
SECONDS_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """`label`: the one label beside vLLM's own, or none."""

    name: str
    help: str
    label: str = ""
    is_histogram: bool = False


METRICS = (
    Metric("asked_blocks", "Prompt blocks that the engine did not have itself and asked for."),
    Metric("onboarded_blocks", "Blocks loaded, by the tier they came from.", "tier"),
    Metric("onboarded_bytes", "Bytes loaded into device blocks."),
    Metric("avoided_blocks", "Blocks there, but computed: loading should have taken longer."),
    Metric("regret_seconds", "What requests took more than the other way, by choice.", "choice"),
    Metric("failed_onboard_blocks", "Blocks promised whose load failed; they were recomputed."),
    Metric("missed_requests", "Requests that got nothing, by reason.", "reason"),
    Metric("offloaded_blocks", "Blocks that this engine put into kvtier."),
    Metric("offloaded_bytes", "Bytes copied out of device blocks."),
    Metric("dropped_blocks", "Blocks planned but not offloaded, by reason.", "reason"),
    Metric("call_errors", "Failed calls to the daemon, by kind.", "error"),
    Metric("hook_seconds", "Time in the connector's hooks on the scheduler's thread."),
    Metric("saved_seconds", "Estimated prefill time spared: at the rate of recent steps."),
    Metric("onboard_seconds", "From allocation until a load was reported.", is_histogram=True),
    Metric("offload_seconds", "From order until an offload was reported.", is_histogram=True),
)
_BY_NAME = {metric.name: metric for metric in METRICS}


def sample(name: str, label: str = "") -> str:
    """The key of one time series in the data that travels."""
    return f"{name} {label}" if label else name


class KVTierStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: increases by `sample` key; lists of observations for histograms."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVTierStats:
        for key, value in other.data.items():
            present = self.data.get(key)
            self.data[key] = value if present is None else present + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """One number each, for a log line."""
        found: dict[str, int | float] = {}
        for key, value in self.data.items():
            if isinstance(value, list):
                found[f"{key} mean"] = round(sum(value) / max(1, len(value)), 6)
            elif value:
                found[key] = round(value, 6)
        return found

    def is_empty(self) -> bool:
        return not self.data

    def __getitem__(self, name: str) -> Any:
        """In an engine of one process the MultiConnector of vLLM 0.28 asks as if we were the
        mapping that we are elsewhere, once serialised."""
        return getattr(self, name)


class KVTierPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics above, one set of children an engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for metric in METRICS:
            names = [*labelnames, metric.label] if metric.label else labelnames
            buckets = {"buckets": SECONDS_BUCKETS} if metric.is_histogram else {}
            kind = metric_types[Histogram if metric.is_histogram else Counter]
            self._metrics[metric.name] = kind(
                name=PREFIX + metric.name, documentation=metric.help, labelnames=names, **buckets
            )
            if not metric.label:  # Shown as 0 from the start.
                for values in per_engine_labelvalues.values():
                    self._metrics[metric.name].labels(*values)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """What is not known here, from another version's process, is left out."""
        for key, value in transfer_stats_data.items():
            name, _, label = key.partition(" ")
            metric = _BY_NAME.get(name)
            if metric is None:
                continue
            values = [*self.per_engine_labelvalues[engine_idx], *([label] if label else [])]
            child = self._metrics[name].labels(*values)
            if metric.is_histogram:
                for seconds in value:
                    child.observe(seconds)
            else:
                child.inc(value)
