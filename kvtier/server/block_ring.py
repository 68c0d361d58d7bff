"""What happened to blocks, the latest so many times: a ring of columns, found by short hash.

Written on every removal, so a whole batch at a time; read when somebody asks, so without an index.
A short hash is the first eight bytes: two blocks that share them are told as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.types import BlockHash, NamespaceId

SHORT_BYTES = 8
_SIEVE_BITS = 16
_SIEVE_MASK = np.uint64((1 << _SIEVE_BITS) - 1)
_COLUMNS = (("shorts", np.uint64), ("times", np.float64), ("namespaces", np.uint16))
_CODES = ("whys", "tiers")
RECORD_BYTES = sum(np.dtype(kind).itemsize for _, kind in _COLUMNS) + len(_CODES)

Shorts = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Remembered:
    """One time that something happened to a block; `why` and `tier` are the caller's numbers."""

    why: int
    tier: int
    at: float


class BlockRing:
    """Invariant: `budget_bytes` is all that it ever takes."""

    def __init__(self, budget_bytes: int) -> None:
        self.capacity = max(1, budget_bytes // RECORD_BYTES)
        self._shorts = np.zeros(self.capacity, dtype=np.uint64)
        self._times = np.zeros(self.capacity, dtype=np.float64)
        self._namespaces = np.zeros(self.capacity, dtype=np.uint16)
        self._whys = np.zeros(self.capacity, dtype=np.uint8)
        self._tiers = np.zeros(self.capacity, dtype=np.uint8)
        self.written_count = 0

    @property
    def taken_bytes(self) -> int:
        columns = (self._shorts, self._times, self._namespaces, self._whys, self._tiers)
        return sum(column.nbytes for column in columns)

    @property
    def oldest_at(self) -> float | None:
        """Everything since then is here; None when nothing was ever forgotten."""
        if self.written_count <= self.capacity:
            return None
        return float(self._times[self.written_count % self.capacity])

    def add(
        self,
        namespace: NamespaceId,
        hashes: Sequence[BlockHash],
        *,
        why: int,
        tier: int,
        at: float,
    ) -> None:
        if not hashes:
            return
        if len(hashes) == 1:  # A miss, as a rule: an index by number is cheaper than an array.
            place: Any = self.written_count % self.capacity
            self._shorts[place] = int.from_bytes(hashes[0][:SHORT_BYTES], "little")
        else:
            shorts = shorts_of(hashes[-self.capacity :])
            first = self.written_count + len(hashes) - len(shorts)
            place = np.arange(first, first + len(shorts)) % self.capacity
            self._shorts[place] = shorts
        self._times[place] = at
        self._namespaces[place] = namespace
        self._whys[place] = why
        self._tiers[place] = tier
        self.written_count += len(hashes)

    def forget(self, namespace: NamespaceId) -> None:
        """Nothing is left of its blocks; the places stay taken."""
        mine = self._namespaces == namespace
        self._shorts[mine] = 0
        self._namespaces[mine] = 0  # Nobody's number.

    def latest(self, namespace: NamespaceId, block: BlockHash, count: int) -> list[Remembered]:
        """The last `count` times, latest first."""
        short = int.from_bytes(block[:SHORT_BYTES], "little")
        here = (self._shorts == short) & (self._namespaces == namespace)
        found = self._in_order(np.flatnonzero(here))[::-1][:count]
        return [self._at(place) for place in found.tolist()]

    def namespaces_of(self, block: BlockHash) -> set[NamespaceId]:
        """Those that remember the block, by one look at all that is here."""
        short = int.from_bytes(block[:SHORT_BYTES], "little")
        found = self._in_order(np.flatnonzero(self._shorts == short))
        return {NamespaceId(one) for one in self._namespaces[found].tolist()}

    def last_of(self, namespace: NamespaceId, shorts: Shorts) -> dict[int, Remembered]:
        """The last time of each of these that is here at all."""
        # Almost all fall through a coarse sieve, which spares sorting everything for `isin`.
        sieve = np.zeros(1 << _SIEVE_BITS, dtype=np.bool_)
        sieve[shorts & _SIEVE_MASK] = True
        near = np.flatnonzero(sieve[self._shorts & _SIEVE_MASK])
        here = np.isin(self._shorts[near], shorts) & (self._namespaces[near] == namespace)
        found = self._in_order(near[here])
        return {int(self._shorts[place]): self._at(place) for place in found.tolist()}

    def _in_order(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Oldest first, without those that were never written."""
        next_place = self.written_count % self.capacity
        if self.written_count < self.capacity:
            return places[places < next_place]
        return np.concatenate([places[places >= next_place], places[places < next_place]])

    def _at(self, place: int) -> Remembered:
        return Remembered(
            int(self._whys[place]), int(self._tiers[place]), float(self._times[place])
        )


def shorts_of(hashes: Sequence[BlockHash]) -> Shorts:
    """The short hashes of blocks of one namespace."""
    size = len(hashes[0])
    packed = np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(len(hashes), size)
    short: Shorts = np.ascontiguousarray(packed[:, :SHORT_BYTES]).view("<u8").reshape(-1)
    return short
