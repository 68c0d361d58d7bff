"""Why a block was no hit: what was here lately and went, for the metrics.

Remembers by hash which blocks have lost a replica, the last DEPARTED_BLOCKS_MAX of them at least
and twice as many at most; a block that is nowhere now and is remembered was evicted, lost with its
segment or found corrupt.

In two Bloom filters (B. H. Bloom, "Space/time trade-offs in hash coding with allowable errors",
CACM 1970), which take up 2 MiB from the first block on: of blocks that never were here one in a
hundred, at most, is called evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from kvtier.core.instructions import BlocksRemoved, NamespaceCleared
from kvtier.server.core_loop import CoreLoop, both
from kvtier.types import BlockHash, Cut, NamespaceId, PackedHashes, PrefixMatch

# A pool of 64 GiB with blocks of 1 MiB is as many blocks.
DEPARTED_BLOCKS_MAX = 65_536
_PLACE_BITS = 20
_PLACE_MASK = (1 << _PLACE_BITS) - 1

_REASONS = {
    Cut.PIN_LIMIT: "pin_limit",
    Cut.DEADLINE: "deadline",
    Cut.NO_SPACE: "no_space",
    Cut.UNMAPPED: "unmapped",
    Cut.DRAINING: "draining",
}


class Missed:
    """Belongs to the event loop."""

    def __init__(self, core: CoreLoop) -> None:
        self._core = core
        self._recent = bytearray(1 << _PLACE_BITS)
        self._older = bytearray(1 << _PLACE_BITS)
        self._recent_count = 0
        self._clears: Counter[NamespaceId] = Counter()

    def beside(
        self, effects: Mapping[type, Callable[..., None]]
    ) -> dict[type, Callable[..., None]]:
        """The same effects, and what happens is noted here as well."""
        return {
            **effects,
            BlocksRemoved: both(effects[BlocksRemoved], self.on_removed),
            NamespaceCleared: both(effects[NamespaceCleared], self.on_cleared),
        }

    def on_removed(self, event: BlocksRemoved) -> None:
        recent, life = self._recent, self._life(event.namespace)
        for block in event.hashes:
            for place in _places(life, block):
                recent[place] = 1
        self._recent_count += len(event.hashes)
        if self._recent_count >= DEPARTED_BLOCKS_MAX:
            self._older, self._recent = recent, bytearray(1 << _PLACE_BITS)
            self._recent_count = 0

    def on_cleared(self, event: NamespaceCleared) -> None:
        """Void blocks are no more known than blocks that never were."""
        self._clears[event.namespace] += 1

    def of_match(self, namespace: NamespaceId, hashes: PackedHashes, found: PrefixMatch) -> str:
        """Of the first block behind the prefix that was found; "" when there is none."""
        if found.matched_count == len(hashes):
            return ""
        return self._absent(namespace, hashes[found.matched_count])

    def of_lease(
        self, namespace: NamespaceId, hashes: PackedHashes, leased_count: int, cut: Cut
    ) -> str:
        """Of the first block that was not leased; "" when there is none."""
        if leased_count == len(hashes):
            return ""
        if cut in _REASONS:
            return _REASONS[cut]
        found = self._core.match_packed(namespace, hashes.packed)
        if found.matched_count > leased_count:
            return "doubt"  # It is said to be here, and was not to be had.
        return self._absent(namespace, hashes[found.matched_count])

    def _absent(self, namespace: NamespaceId, block: BlockHash) -> str:
        places = _places(self._life(namespace), block)
        is_known = any(all(map(one.__getitem__, places)) for one in (self._recent, self._older))
        return "evicted" if is_known else "unseen"

    def _life(self, namespace: NamespaceId) -> int:
        """Of a namespace from one clear to the next."""
        return hash((namespace, self._clears[namespace]))


def _places(life: int, block: BlockHash) -> tuple[int, int, int]:
    """In a filter."""
    bits = life ^ hash(block)  # Keyed: nobody can choose blocks that look alike.
    return (
        bits & _PLACE_MASK,
        bits >> _PLACE_BITS & _PLACE_MASK,
        bits >> 2 * _PLACE_BITS & _PLACE_MASK,
    )
