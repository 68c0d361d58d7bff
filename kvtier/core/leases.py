"""Leases: an engine's hold on blocks until a deadline.

The worker itself checks the deadline before it starts a copy, and nothing leased is reused before
deadline + margin, even if the session ends, unless the engine is proven dead. So a worker that was
stopped in mid-copy finds its bytes untouched, or finds out that it is late.

The table keeps who leased which places until when. Pins are counted in `MemoryTier`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.core.replica import Places
from kvtier.types import EngineId, LeaseId, NamespaceId, SessionId

LowerSlots = npt.NDArray[np.int64]


@dataclass(slots=True)
class Lease:
    lease: LeaseId
    session: SessionId
    engine: EngineId | None
    namespace: NamespaceId
    deadline: float
    began_at: float = 0.0
    # One array a slice of Acquire. NOBODY stands for a block that the engine has itself and that is
    # not in memory, or that is leased where it lies below.
    places: list[Places] = field(default_factory=list)
    # Likewise: the slot in a tier below of what is leased as it lies there, else NOBODY.
    direct: list[LowerSlots] = field(default_factory=list)
    # 0 for what was in memory, else which tier below it comes from, counted from 1.
    origins: list[npt.NDArray[np.int8]] = field(default_factory=list)

    def all_places(self) -> Places:
        return np.concatenate(self.places) if self.places else np.zeros(0, dtype=np.int32)

    def all_direct(self) -> LowerSlots:
        return np.concatenate(self.direct) if self.direct else np.zeros(0, dtype=np.int64)

    def all_origins(self) -> npt.NDArray[np.int8]:
        return np.concatenate(self.origins) if self.origins else np.zeros(0, dtype=np.int8)


class LeaseTable:
    """Invariant: every lease ends exactly once: released, expired, or with its engine."""

    def __init__(self, *, margin_seconds: float, lease_first: int = 1) -> None:
        self._margin_seconds = margin_seconds
        self._leases: dict[LeaseId, Lease] = {}
        self._by_session: dict[SessionId, dict[LeaseId, None]] = {}
        self._expiry: list[tuple[float, LeaseId]] = []
        self._next_id = lease_first

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self,
        *,
        session: SessionId,
        engine: EngineId | None,
        namespace: NamespaceId,
        deadline: float,
        now: float = 0.0,
    ) -> Lease:
        """A lease on nothing yet; Acquire adds places slice by slice."""
        lease = Lease(LeaseId(self._next_id), session, engine, namespace, deadline, now)
        self._next_id += 1
        self._leases[lease.lease] = lease
        self._by_session.setdefault(session, {})[lease.lease] = None
        heapq.heappush(self._expiry, (deadline + self._margin_seconds, lease.lease))
        return lease

    def get(self, lease: LeaseId) -> Lease | None:
        return self._leases.get(lease)

    def count_of(self, session: SessionId) -> int:
        return len(self._by_session.get(session, ()))

    def end(self, lease: LeaseId) -> Lease | None:
        """Forget a lease and return it; None when it has ended already."""
        found = self._leases.pop(lease, None)
        if found is not None:
            mine = self._by_session[found.session]
            del mine[lease]
            if not mine:
                del self._by_session[found.session]
        return found

    def expire(self, *, now: float) -> list[Lease]:
        """Remove and return every lease whose deadline + margin has come, oldest first."""
        ended = []
        while self._expiry and self._expiry[0][0] <= now:
            _, lease = heapq.heappop(self._expiry)
            found = self.end(lease)
            if found is not None:
                ended.append(found)
        if len(self._expiry) > 2 * len(self._leases) + 1024:
            self._expiry = [entry for entry in self._expiry if entry[1] in self._leases]
            heapq.heapify(self._expiry)
        return ended

    def end_engine(self, engine: EngineId) -> list[Lease]:
        """Remove and return the leases of an engine that is proven dead."""
        mine = [lease.lease for lease in self._leases.values() if lease.engine == engine]
        return [ended for lease in mine if (ended := self.end(lease)) is not None]

    def next_expiry(self) -> float | None:
        return self._expiry[0][0] if self._expiry else None

    def oldest_at(self) -> float | None:
        """When the oldest of them began."""
        return next((lease.began_at for lease in self._leases.values()), None)

    def all_leases(self) -> list[Lease]:
        return list(self._leases.values())
