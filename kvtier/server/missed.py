"""Why a block was no hit: what was here lately and went, for the metrics.

Remembers by hash which blocks have lost a replica, the last DEPARTED_BLOCKS_MAX of them at least
and twice as many at most; a block that is nowhere now and is remembered was evicted, lost with its
segment or found corrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtier.core.instructions import BlocksRemoved, NamespaceCleared
from kvtier.server.core_loop import CoreLoop, both
from kvtier.types import BlockHash, Cut, NamespaceId, PackedHashes, PrefixMatch

# Some 100 bytes each. A pool of 64 GiB with blocks of 1 MiB is as many blocks.
DEPARTED_BLOCKS_MAX = 65_536

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
        self._recent: dict[NamespaceId, set[BlockHash]] = {}
        self._older: dict[NamespaceId, set[BlockHash]] = {}
        self._recent_count = 0

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
        self._recent.setdefault(event.namespace, set()).update(event.hashes)
        self._recent_count += len(event.hashes)
        if self._recent_count >= DEPARTED_BLOCKS_MAX:
            self._older, self._recent, self._recent_count = self._recent, {}, 0

    def on_cleared(self, event: NamespaceCleared) -> None:
        """Void blocks are no more known than blocks that never were."""
        self._recent.pop(event.namespace, None)
        self._older.pop(event.namespace, None)

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
        for hashes in (self._recent, self._older):
            if block in hashes.get(namespace, ()):
                return "evicted"
        return "unseen"
