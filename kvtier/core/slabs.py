"""Who owns which slab: the DRAM budget shared out to namespaces in slab sets.

A slab is populated by the pool, waits in the *stock*, is bound to a namespace as part of a set (one
slab a shard), is mapped by worker processes, and may be withdrawn: emptied, unmapped by everyone,
then dropped, upon which the pool populates a fresh one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.types import NamespaceId, SessionId, SlabId, SlabSetId


@dataclass(slots=True)
class SlabSet:
    slab_set: SlabSetId
    namespace: NamespaceId
    slabs: tuple[SlabId, ...]  # Index: shard.
    slot_first: int
    slot_count: int
    bound_at: float
    withdrawn: bool = False
    mapped_by: dict[SlabId, dict[SessionId, None]] = field(default_factory=dict)

    def is_mapped(self) -> bool:
        return any(self.mapped_by.values())


class SlabLedger:
    """Invariant: a slab is in the stock or in exactly one set."""

    def __init__(self, *, slab_bytes: int, slab_count_max: int) -> None:
        self.slab_bytes = slab_bytes
        self.slab_count_max = slab_count_max
        self.stock: list[SlabId] = []
        self.sets: dict[SlabSetId, SlabSet] = {}
        self._set_of: dict[SlabId, SlabSetId] = {}
        self._next_set = 1
        self._next_slot = 0

    @property
    def bound_count(self) -> int:
        return len(self._set_of)

    @property
    def pending_count(self) -> int:
        """Slabs of the budget that the pool has not populated yet."""
        return self.slab_count_max - self.bound_count - len(self.stock)

    def slot_count_of(self, slot_bytes: int) -> int:
        return self.slab_bytes // slot_bytes

    def bind(
        self, namespace: NamespaceId, *, shard_count: int, slot_bytes: int, now: float
    ) -> SlabSet | None:
        """Bind one slab a shard from the stock, if there are as many."""
        if len(self.stock) < shard_count:
            return None
        slabs = tuple(self.stock[:shard_count])
        del self.stock[:shard_count]
        slot_count = self.slot_count_of(slot_bytes)
        bound = SlabSet(
            SlabSetId(self._next_set), namespace, slabs, self._next_slot, slot_count, now
        )
        self._next_set += 1
        self._next_slot += slot_count
        assert self._next_slot <= 1 << 32, "slot numbers are used up"
        self.sets[bound.slab_set] = bound
        for slab in slabs:
            self._set_of[slab] = bound.slab_set
            bound.mapped_by[slab] = {}
        return bound

    def set_with(self, slab: SlabId) -> SlabSet | None:
        found = self._set_of.get(slab)
        return None if found is None else self.sets[found]

    def sets_of(self, namespace: NamespaceId) -> list[SlabSet]:
        return [one for one in self.sets.values() if one.namespace == namespace]

    def remove(self, slab_set: SlabSetId) -> None:
        """Forget a set; its slabs leave the ledger (the pool will populate fresh ones)."""
        for slab in self.sets.pop(slab_set).slabs:
            del self._set_of[slab]

    def unmap_session(self, session: SessionId) -> None:
        for one in self.sets.values():
            for sessions in one.mapped_by.values():
                sessions.pop(session, None)

    def check_invariants(self) -> list[str]:
        known = [*self.stock, *self._set_of]
        if len(known) != len(set(known)):
            return ["a slab is in the stock and in a set"]
        if len(known) > self.slab_count_max:
            return ["more slabs than the budget allows"]
        return []
