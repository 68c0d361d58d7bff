"""Where metrics are declared: each once, with its kind, its help and labels from closed sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

_SECONDS_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.5, 2.5)


@dataclass(frozen=True, slots=True)
class Declared:
    """What docs/metrics.md says of one metric."""

    name: str
    kind: str
    help: str
    labels: Mapping[str, Sequence[str]]


class Registry:
    """One daemon's own metrics. Written on the event loop only."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # Three lines a counter less.
        self.declared: list[Declared] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._followed: dict[Counter, int] = {}

    def counter(
        self, name: str, text: str, labels: Mapping[str, Sequence[str]], *, prefill: bool = True
    ) -> Counter:
        self.declared.append(Declared(name, "counter", text, labels))
        # prometheus_client adds "_total" itself.
        made = Counter(name.removesuffix("_total"), text, tuple(labels), registry=self._registry)
        if prefill and len(labels) == 1:
            for value in next(iter(labels.values())):
                made.labels(value)
        return made

    def gauge(self, name: str, text: str, labels: Mapping[str, Sequence[str]]) -> Gauge:
        self.declared.append(Declared(name, "gauge", text, labels))
        return Gauge(name, text, tuple(labels), registry=self._registry)

    def histogram(self, name: str, text: str, labels: Mapping[str, Sequence[str]]) -> Histogram:
        self.declared.append(Declared(name, "histogram", text, labels))
        return Histogram(
            name, text, tuple(labels), buckets=_SECONDS_BUCKETS, registry=self._registry
        )

    def follow(self, counter: Counter, count: int) -> None:
        """Bring the counter to a count that somebody else keeps."""
        counter.inc(count - self._followed.get(counter, 0))
        self._followed[counter] = count

    def text(self) -> bytes:
        """What /metrics answers."""
        return generate_latest(self._registry)

    def samples(self) -> dict[str, float]:
        """The same as a mapping: `name{label="value"}` -> value."""
        found = {}
        for family in self._registry.collect():
            for sample in family.samples:
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found
