"""What eviction policies learn in the background: the shell does the work, the core hands it over.

And what such a policy may ask of a namespace's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.salting import salted
from kvtier.policy.eviction import Keys
from kvtier.types import BlockHash, NamespaceId, PackedHashes

if TYPE_CHECKING:
    from kvtier.core.index import PrefixIndex, Rows
    from kvtier.core.namespace_facts import NamespaceFacts
    from kvtier.core.residency import Residency

_KEY_BYTES = 8


def keys_of(hashes: Sequence[BlockHash], start: int = 0, salt: bytes = b"") -> Keys:
    """The last 64 bits of each hash, salted, from `start` on; all are of one length, 8 bytes or
    more."""
    if start >= len(hashes):
        return np.zeros(0, dtype=np.uint64)
    if salt:
        hashes = [BlockHash(salted(block, salt)) for block in hashes[start:]]
        start = 0
    # Packed ones are not cut into hashes for this: they may be 100,000.
    joined = hashes.packed if isinstance(hashes, PackedHashes) else b"".join(hashes)
    packed = np.frombuffer(joined, dtype=np.uint8).reshape(len(hashes), -1)[start:]
    keys: Keys = np.ascontiguousarray(packed[:, -_KEY_BYTES:]).view(np.uint64)[:, 0]
    return keys


class IndexedBlocks:
    """The blocks of one index, as policies see them."""

    def __init__(self, index: PrefixIndex, facts: NamespaceFacts) -> None:
        self._index, self._salt = index, facts.key_salt
        self.count_max, self.block_tokens = facts.block_count_max, facts.block_tokens

    def keys_of(self, rows: Rows) -> Keys:
        hash_of = self._index.hash_of
        found = [cast(BlockHash, hash_of[row]) for row in rows.tolist()]
        return keys_of(found, salt=self._salt)

    def parents_of(self, rows: Rows) -> Rows:
        return self._index.parent[rows]


class Learning:
    """Part of the block manager; it has no state of its own."""

    def __init__(self, namespaces: Mapping[NamespaceId, Residency]) -> None:
        self._namespaces = namespaces

    def handlers(self) -> dict[type, Callable[[Any, float], list[ins.Instruction]]]:
        return {ev.Refitted: self._on_refitted}

    def begin(self) -> list[ins.Instruction]:
        """Of every policy for which it is time."""
        found: list[ins.Instruction] = []
        for namespace, residency in self._namespaces.items():
            work = residency.learning.begin_refit() if residency.learning is not None else None
            if work is not None:
                found.append(ins.Refit(namespace, residency.epoch, work))
        return found

    def _on_refitted(self, event: ev.Refitted, now: float) -> list[ins.Instruction]:
        residency = self._namespaces[event.namespace]
        if event.epoch == residency.epoch:  # Else it was cleared, and begins to learn anew.
            assert residency.learning is not None, "a policy that does not learn"
            residency.learning.end_refit(event.result)
        return []
