"""Watchers: bounded queues of stored and removed blocks, one a Watch call.

A watcher that falls behind loses events and is told how many; nobody else waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvtier.core.instructions import BlocksRemoved, BlocksStored, NamespaceCleared
from kvtier.errors import LimitExceeded
from kvtier.metrics import Metrics
from kvtier.types import BlockHash, NamespaceId
from kvtier.v1 import kvtier_pb2 as pb

TokenIds = Mapping[BlockHash, Sequence[int]]


class Watcher:
    """One Watch call's events. `sequence` counts what happened, lost events included."""

    def __init__(self, events_max: int, metrics: Metrics) -> None:
        self._events_max = events_max
        self._metrics = metrics
        self._waiting: deque[pb.WatchResponse] = deque()
        self._lost_count = 0
        self._sequence = 0
        self._arrived = asyncio.Event()

    def push(self, event: pb.WatchResponse) -> None:
        self._sequence += 1
        if len(self._waiting) >= self._events_max:
            self._lost_count += 1
            self._metrics.calls.watch_lost_events.inc()
            return
        if self._lost_count:
            # What was lost lies before this event: say so in its place.
            self._waiting.append(self._lost_event(self._sequence - 1))
        event.sequence = self._sequence
        self._waiting.append(event)
        self._arrived.set()

    async def next_event(self) -> pb.WatchResponse:
        while True:  # Ends with an event, or when the call is cancelled.
            if self._waiting:
                return self._waiting.popleft()
            if self._lost_count:
                return self._lost_event(self._sequence)
            self._arrived.clear()
            await self._arrived.wait()

    def _lost_event(self, sequence: int) -> pb.WatchResponse:
        lost = pb.WatchResponse(lost=pb.EventsLost(count=self._lost_count), sequence=sequence)
        self._lost_count = 0
        return lost


class WatchHub:
    """Fans instructions out to the watchers of a namespace."""

    def __init__(self, *, watchers_max: int, events_max: int, metrics: Metrics) -> None:
        self.watchers_max = watchers_max
        self._events_max = events_max
        self._metrics = metrics
        self._watchers: dict[NamespaceId, list[Watcher]] = {}
        self._counts: dict[str, int] = {}  # By tenant.
        self._token_ids: dict[BlockHash, Sequence[int]] = {}
        self.wants_token_ids = False  # Somebody else than a watcher does.

    def __len__(self) -> int:
        return sum(map(len, self._watchers.values()))

    @contextmanager
    def watching(self, namespace: NamespaceId, tenant: str = "") -> Iterator[Watcher]:
        if self._counts.get(tenant, 0) >= self.watchers_max:
            raise LimitExceeded(
                f"{self.watchers_max} watchers are connected (server.watchers_max): end one"
            )
        watcher = Watcher(self._events_max, self._metrics)
        self._counts[tenant] = self._counts.get(tenant, 0) + 1
        self._watchers.setdefault(namespace, []).append(watcher)
        try:
            yield watcher
        finally:
            self._counts[tenant] -= 1
            mine = self._watchers[namespace]
            mine.remove(watcher)
            if not mine:
                del self._watchers[namespace]

    def is_watched(self, namespace: NamespaceId) -> bool:
        return self.wants_token_ids or namespace in self._watchers

    @contextmanager
    def describing(self, token_ids: TokenIds) -> Iterator[None]:
        """Events about these blocks inside this bracket carry their tokens."""
        self._token_ids.update(token_ids)
        try:
            yield
        finally:
            for block in token_ids:
                self._token_ids.pop(block, None)

    def tokens_of(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Those that a call brought for these blocks; none unless it brought them for all."""
        known = self._token_ids
        if not known or not all(one in known for one in hashes):
            return []
        return [token for one in hashes for token in known[one]]

    def on_stored(self, event: BlocksStored) -> None:
        for watcher in self._watchers.get(event.namespace, ()):
            stored = pb.BlocksStored(
                hashes=b"".join(event.hashes),
                parent=event.parent or b"",
                tier=event.tier,
                token_ids=self.tokens_of(event.hashes),
            )
            watcher.push(pb.WatchResponse(stored=stored))

    def on_removed(self, event: BlocksRemoved) -> None:
        for watcher in self._watchers.get(event.namespace, ()):
            removed = pb.BlocksRemoved(hashes=b"".join(event.hashes), tier=event.tier)
            watcher.push(pb.WatchResponse(removed=removed))

    def on_cleared(self, event: NamespaceCleared) -> None:
        for watcher in self._watchers.get(event.namespace, ()):
            watcher.push(pb.WatchResponse(cleared=pb.NamespaceCleared(epoch=event.epoch)))
