"""Where prefixes are, tier by tier: questions of people, which change nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.core.index import NOBODY, Rows
from kvtier.core.residency import Residency
from kvtier.types import BlockHash, NamespaceId, TierName

# A walk up a chain takes about 0.1 µs a block, and holds the event loop.
WALKED_BLOCKS_MAX = 16_384


@dataclass(frozen=True, slots=True)
class PlaceRun:
    """Blocks in a row that are in the same tiers."""

    first_index: int
    count: int
    tiers: tuple[TierName, ...]


@dataclass(frozen=True, slots=True)
class PrefixPlaces:
    """A resident prefix. With `is_cut_off` it is longer: `runs` are of its last blocks."""

    runs: tuple[PlaceRun, ...]
    is_cut_off: bool

    @property
    def block_count(self) -> int:
        return sum(run.count for run in self.runs)


class Locator:
    """Part of the block manager."""

    def __init__(self, namespaces: Mapping[NamespaceId, Residency]) -> None:
        self._namespaces = namespaces

    def has(self, namespace: NamespaceId, block: BlockHash) -> bool:
        return block in self._namespaces[namespace].index.row_of

    def prefix(self, namespace: NamespaceId, last: BlockHash) -> PrefixPlaces | None:
        """The prefix that ends with this block; None when it is not resident."""
        residency = self._namespaces[namespace]
        row = residency.index.row_of.get(last)
        if row is None:
            return None
        walked: list[int] = []
        at, parent = row, residency.index.parent
        while at != NOBODY and len(walked) < WALKED_BLOCKS_MAX:
            walked.append(at)
            at = int(parent[at])
        walked.reverse()
        rows = np.array(walked, dtype=np.int32)
        return PrefixPlaces(self._runs(residency, rows), at != NOBODY)

    def leading(self, namespace: NamespaceId, hashes: Sequence[BlockHash]) -> tuple[PlaceRun, ...]:
        """The leading resident blocks of these."""
        residency = self._namespaces[namespace]
        return self._runs(residency, residency.index.rows(hashes))

    def _runs(self, residency: Residency, rows: Rows) -> tuple[PlaceRun, ...]:
        if not len(rows):
            return ()
        index = residency.index
        masks: npt.NDArray[np.uint8] = residency.tier.is_ready(index.place[rows]).astype(np.uint8)
        for bit, columns in enumerate(index.lower.values(), start=1):
            masks |= (columns.slot[rows] != NOBODY).astype(np.uint8) << np.uint8(bit)
        starts = np.flatnonzero(np.diff(masks, prepend=~masks[:1]))
        stops = [*starts[1:].tolist(), len(rows)]
        names = (TierName.DRAM, *index.lower)
        return tuple(
            PlaceRun(
                first,
                stop - first,
                tuple(name for bit, name in enumerate(names) if int(masks[first]) >> bit & 1),
            )
            for first, stop in zip(starts.tolist(), stops, strict=True)
        )
