"""What eviction policies learn in the background: the shell does the work, the core hands it over.

And what such a policy may ask of a namespace's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.salting import salted
from kvtier.errors import UnknownNamespace
from kvtier.policy.eviction import Keys, TurnKindPolicy
from kvtier.types import BlockHash, NamespaceId, PackedHashes

if TYPE_CHECKING:
    from kvtier.core.index import PrefixIndex, Rows
    from kvtier.core.namespace_facts import NamespaceFacts
    from kvtier.core.replica import Places
    from kvtier.core.residency import Residency

_KEY_BYTES = 8
_HINT_SLICE_BLOCKS = 1024


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
    if len(joined) % (_KEY_BYTES * len(hashes)) == 0:
        words = np.frombuffer(joined, dtype=np.uint64).reshape(len(hashes), -1)
        last: Keys = words[start:, -1]
        return last
    packed = np.frombuffer(joined, dtype=np.uint8).reshape(len(hashes), -1)[start:]
    keys: Keys = np.ascontiguousarray(packed[:, -_KEY_BYTES:]).view(np.uint64)[:, 0]
    return keys


def rows_and_keys(
    residency: Residency, places: Places, hashes: Sequence[BlockHash]
) -> tuple[Rows, Keys]:
    """How policies are told of a chain, whose leading blocks are in these places: by rows what is
    in memory, by keys what comes after."""
    tier = residency.tier
    ready = np.flatnonzero(tier.is_ready(places))
    count = int(ready[-1]) + 1 if len(ready) else 0
    return tier.row[places[ready]], keys_of(hashes, count, residency.facts.key_salt)


class IndexedBlocks:
    """The blocks of one index, as policies see them."""

    def __init__(self, index: PrefixIndex, facts: NamespaceFacts) -> None:
        self._index, self._salt = index, facts.key_salt
        self.count_max, self.block_tokens = facts.block_count_max, facts.block_tokens

    def keys_of(self, rows: Rows) -> Keys:
        hash_of = self._index.hash_of
        found = [hash_of[row] for row in rows.tolist()]
        return keys_of(cast(list[BlockHash], found), salt=self._salt)

    def parents_of(self, rows: Rows) -> Rows:
        return self._index.parent[rows]


class Learning:
    """Part of the block manager; it has no state of its own."""

    def __init__(self, namespaces: Mapping[NamespaceId, Residency]) -> None:
        self._namespaces = namespaces

    def handlers(self) -> dict[type, Callable[[Any, float], list[ins.Instruction]]]:
        return {ev.Refitted: self._on_refitted, ev.HintTurnKind: self._on_hint_turn_kind}

    def begin(self) -> list[ins.Instruction]:
        """Of every policy for which it is time."""
        found: list[ins.Instruction] = []
        for namespace, residency in self._namespaces.items():
            work = residency.learning.begin_refit() if residency.learning is not None else None
            if work is not None:
                found.append(ins.Refit(namespace, residency.epoch, work))
        return found

    def _on_hint_turn_kind(self, event: ev.HintTurnKind, now: float) -> list[ins.Instruction]:
        residency = self._namespaces.get(event.namespace)
        if residency is None:
            raise UnknownNamespace(f"namespace {event.namespace} is not open: open it again")
        stop = event.done_count + _HINT_SLICE_BLOCKS
        part = event.hashes[event.done_count : stop]
        policy = residency.policy
        if not isinstance(policy, TurnKindPolicy):
            return [ins.HintUsed(False)]
        places = residency.index.place[residency.index.rows(part)]
        policy.on_turn_kind(*rows_and_keys(residency, places, part), event.turn_kind)
        if stop < len(event.hashes):
            return [ins.Continue(replace(event, done_count=stop))]
        return [ins.HintUsed(True)]

    def _on_refitted(self, event: ev.Refitted, now: float) -> list[ins.Instruction]:
        residency = self._namespaces[event.namespace]
        if event.epoch == residency.epoch:  # Else it was cleared, and begins to learn anew.
            assert residency.learning is not None, "a policy that does not learn"
            residency.learning.end_refit(event.result)
        return []
