"""Which blocks stand on NVMe by the daemon's word, and since when: its Watch events, followed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from kvtier.client import Client, Namespace
from kvtier.errors import KVTierError
from kvtier.types import TierName
from kvtier.v1 import kvtier_pb2 as pb


class Standing:
    """Of one namespace; forgets all of it when the daemon ends, but for `of_last_life`.

    Times are those at which the events arrived here, which is later than the daemon's.
    """

    def __init__(self, client: Client, namespace: Namespace) -> None:
        self._client = client
        self._namespace = namespace
        self._lock = threading.Lock()
        self._since: dict[bytes, float] = {}
        self._last: dict[bytes, float] = {}
        self.ended_count = 0  # Lives of the daemon that have ended.
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def note(self, hashes: Iterable[bytes]) -> None:
        """These were found there."""
        now = time.monotonic()
        with self._lock:
            for one in hashes:
                self._since.setdefault(one, now)

    def of_last_life(self, at: float) -> set[bytes]:
        """What stood there at that time and was not removed until the daemon ended."""
        with self._lock:
            return {one for one, since in self._last.items() if since <= at}

    def _follow(self) -> None:
        size = self._namespace.spec.hash_bytes
        try:
            for event in self._client.watch(self._namespace):
                with self._lock:
                    self._take(event, size)
        except KVTierError:
            return  # The client was closed.

    def _take(self, event: pb.WatchResponse, size: int) -> None:
        kind = event.WhichOneof("event")
        if kind == "stored" and event.stored.tier == TierName.NVME:
            now = time.monotonic()
            for one in _cut(event.stored.hashes, size):
                self._since.setdefault(one, now)
        elif kind == "removed" and event.removed.tier == TierName.NVME:
            for one in _cut(event.removed.hashes, size):
                self._since.pop(one, None)
        elif kind == "cleared":
            self._since.clear()
        elif kind == "lost":
            self._last, self._since = self._since, {}
            if event.lost.count:
                self._last.clear()  # We were too slow: nothing is known.
            else:
                self.ended_count += 1


def _cut(packed: bytes, size: int) -> list[bytes]:
    return [packed[start : start + size] for start in range(0, len(packed), size)]
