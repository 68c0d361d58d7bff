"""What almost every part of the shell needs, handed over together."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.clock import Clock
from kvtier.metrics import Metrics
from kvtier.server.core_loop import CoreLoop
from kvtier.server.history import History
from kvtier.server.missed import Missed
from kvtier.server.namespaces import Namespaces

HISTORY_BYTES_MIN = 64 << 10


@dataclass(frozen=True, slots=True)
class Base:
    core: CoreLoop
    namespaces: Namespaces
    clock: Clock
    metrics: Metrics
    history: History = field(default_factory=lambda: History(budget_bytes=HISTORY_BYTES_MIN))
    missed: Missed = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "missed", Missed(self.core))
