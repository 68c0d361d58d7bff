"""A manager that writes down what it is told; a core loop around it needs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import Session
from kvtier.core.listing import Listing
from kvtier.core.stats import ManagerStats
from kvtier.types import LeaseId, NamespaceId, PrefixMatch, TierName

E = TypeVar("E")


@dataclass
class RecordingManager:
    """Answers each event with what `answer` says; by default with nothing."""

    events: list[ev.Event] = field(default_factory=list)
    on_event: Callable[[], None] = lambda: None
    answer: Callable[[ev.Event], list[ins.Instruction]] = lambda _: []
    recency_slots: list[int] = field(default_factory=list)
    counts: ManagerStats | None = None

    def handle(self, event: ev.Event, now: float) -> list[ins.Instruction]:
        self.events.append(event)
        self.on_event()
        return self.answer(event)

    def of(self, kind: type[E]) -> list[E]:
        """The events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    def match_packed(self, namespace: NamespaceId, packed: bytes) -> PrefixMatch:
        return PrefixMatch(0, 0)

    def listing(self, namespace: NamespaceId, row_first: int) -> Listing:
        return Listing(b"", b"", 0)

    def namespace_epoch(self, namespace: NamespaceId) -> int:
        return 1

    def recency(self, tier: TierName) -> ev.Slots:
        return np.array(self.recency_slots, np.uint32)

    def lease_namespace(self, lease: LeaseId) -> NamespaceId | None:
        return None

    def next_deadline(self) -> float | None:
        return None

    def stats(self) -> ManagerStats:
        assert self.counts is not None, "the test has set no counts"
        return self.counts

    def sessions(self) -> list[Session]:
        return []

    def check_invariants(self) -> list[str]:
        return []
