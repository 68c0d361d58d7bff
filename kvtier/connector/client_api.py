"""What the connector needs of `kvtier.client`, as protocols.

Handles that only travel back to the client (namespace, session) are `Any`, so that the connector
can be tested with an in-memory client that shares no class with the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.client.arena import SlabPins
from kvtier.namespace import NamespaceSpec
from kvtier.types import CommitOutcome, Cut, PrefixMatch, TierName, Worth

SlotView = npt.NDArray[np.uint8]


class SessionLike(Protocol):
    """Names one session of one life of the daemon; comparable and picklable."""

    @property
    def generation(self) -> int: ...
    @property
    def session_id(self) -> int: ...


class LeaseLike(Protocol):
    """A granted lease; `lease_id` is None when no block could be leased."""

    @property
    def lease_id(self) -> Any: ...
    @property
    def session(self) -> Any: ...
    @property
    def leased_count(self) -> int: ...
    @property
    def slots(self) -> npt.NDArray[np.uint32] | npt.NDArray[np.uint64]: ...
    @property
    def deadline_ns(self) -> int: ...
    @property
    def cut(self) -> Cut: ...
    @property
    def tiers(self) -> Sequence[tuple[TierName, int]]: ...


class ReservationLike(Protocol):
    """Slots taken for this session, and the most it may hold."""

    @property
    def session(self) -> Any: ...
    @property
    def slots(self) -> npt.NDArray[np.uint32]: ...
    @property
    def epoch(self) -> int: ...
    @property
    def stock_count_max(self) -> int: ...


class SchedulerClient(Protocol):
    """The calls of the scheduler side; all but the properties wait, up to their own deadline."""

    @property
    def connected(self) -> bool: ...
    @property
    def by_value(self) -> bool: ...
    @property
    def session(self) -> Any: ...

    def open_namespace(self, spec: NamespaceSpec) -> Any: ...
    def match(
        self, namespace: Any, hashes: Sequence[bytes], *, request_id: str = ""
    ) -> PrefixMatch: ...
    def acquire(
        self,
        namespace: Any,
        hashes: Sequence[bytes],
        *,
        lease_seconds: float | None = None,
        wait_seconds: float = 0.0,
        skip_count: int = 0,
        request_id: str = "",
    ) -> LeaseLike: ...
    def release(self, leases: Sequence[Any], worth: Worth | None = None) -> int: ...
    def reserve(self, namespace: Any, count: int) -> ReservationLike: ...
    def commit(
        self,
        namespace: Any,
        hashes: Sequence[bytes],
        slots: Sequence[int],
        *,
        parent: bytes | None = None,
        session: Any,
        epoch: int,
        checksums: Sequence[int] | None = None,
        token_ids: Sequence[int] = (),
    ) -> list[CommitOutcome]: ...
    def abort(self, namespace: Any, slots: Sequence[int], *, session: Any) -> int: ...
    def clear(self, namespace: Any) -> int: ...
    def hint(
        self,
        namespace: Any,
        hashes: Sequence[bytes],
        *,
        session_end: bool = False,
        paused_seconds: float | None = None,
        turn_kind: str | None = None,
    ) -> bool: ...
    def set_recall_handler(self, handler: Callable[[Any, int], None] | None) -> None: ...


class ArenaLike(Protocol):
    """One shard's mapped slabs; raises StaleSlot for what is not, or no longer, ours."""

    def hold(self, slots: Any, session: Any) -> AbstractContextManager[list[SlotView]]:
        """Views for the length of a copy: the slabs stay mapped, and nobody is told of quiet."""
        ...


class WorkerClient(Protocol):
    """The calls of the worker side."""

    def open_namespace(self, spec: NamespaceSpec) -> Any: ...
    def arena(self, namespace: Any, shard: int = 0) -> Any: ...
    def add_quiet_handler(self, handler: Callable[[Any], None]) -> None: ...
    def set_slab_pins(self, pins: SlabPins) -> None: ...
