"""Where metrics are declared: each once, with its kind, its help and labels from closed sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
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
        self._shows: list[Callable[[], None]] = []

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
        increase = count - self._followed.get(counter, 0)
        if increase:
            counter.inc(increase)
            self._followed[counter] = count

    def remove(self, metric: Counter | Gauge, *labels: str) -> None:
        """End this series; a count that comes again begins at 0."""
        if isinstance(metric, Counter):
            self._followed.pop(metric.labels(*labels), None)
        metric.remove(*labels)

    def on_gather(self, show: Callable[[], None]) -> None:
        """Call this before samples are taken, for what is counted elsewhere."""
        self._shows.append(show)

    def gather(self) -> list[Metric]:
        """All samples of one moment; on the event loop."""
        for show in self._shows:
            show()
        return list(self._registry.collect())

    def samples(self) -> dict[str, float]:
        """`name{label="value"}` -> value."""
        return samples_of(self.gather())


class _Gathered:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def samples_of(families: list[Metric]) -> dict[str, float]:
    """`name{label="value"}` -> value, of what was gathered; in any thread."""
    found = {}
    for family in families:
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def text_of(families: list[Metric]) -> bytes:
    """What /metrics answers; in any thread, as it takes longer than the event loop can wait."""
    return generate_latest(_Gathered(families))
