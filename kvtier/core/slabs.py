"""Who owns which slab: the DRAM budget shared out to namespaces in slab sets.

A slab is populated by the pool, waits in the *stock*, is bound to a namespace as part of a set (one
slab a shard), is mapped by worker processes, and may be withdrawn: emptied, unmapped by everyone,
then dropped, upon which the pool populates a fresh one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.core.slots import Slots
from kvtier.types import NamespaceId, SessionId, SlabId, SlabSetId


@dataclass(slots=True)
class SlabSet:
    slab_set: SlabSetId
    namespace: NamespaceId
    slabs: tuple[SlabId, ...]  # Index: shard.
    slot_first: int
    slot_count: int
    bound_at: float
    node: int | None = None  # That all of its slabs lie on; None when that may be any.
    withdrawn: bool = False
    withdrawn_at: float = 0.0
    promised_to: NamespaceId | None = None  # For whom it was withdrawn.
    voided_count: int = 0  # Of a withdrawn set: slots whose replicas were voided so far.
    mapped_by: dict[SlabId, dict[SessionId, None]] = field(default_factory=dict)
    # Sessions that were offered the slab and have not answered: they may map it any moment.
    offered_to: dict[SlabId, dict[SessionId, None]] = field(default_factory=dict)

    def is_held(self) -> bool:
        """Whether some process maps one of the slabs, or may do so any moment."""
        return any(self.mapped_by.values()) or any(self.offered_to.values())

    def is_void(self) -> bool:
        """Withdrawn, and every replica in it has been voided."""
        return self.withdrawn and self.voided_count == self.slot_count

    def holders_of(self, slab: SlabId) -> list[SessionId]:
        return list({**self.mapped_by[slab], **self.offered_to[slab]})

    def note_mapped(self, slab: SlabId, session: SessionId) -> None:
        """The session maps a slab that it was offered; anything else is no news."""
        if session in self.offered_to[slab]:
            del self.offered_to[slab][session]
            self.mapped_by[slab][session] = None

    def note_unmapped(self, slab: SlabId, session: SessionId) -> None:
        self.mapped_by[slab].pop(session, None)
        self.offered_to[slab].pop(session, None)


class SlabLedger:
    """Invariant: a slab is in the stock or in exactly one set."""

    def __init__(self, *, slab_bytes: int, slab_count_max: int) -> None:
        self.slab_bytes = slab_bytes
        self.slab_count_max = slab_count_max
        self.stock: list[SlabId] = []
        self.sets: dict[SlabSetId, SlabSet] = {}
        self._node_of: dict[SlabId, int] = {}  # Where that is known.
        self._set_of: dict[SlabId, SlabSetId] = {}
        self._next_set = 1
        self._next_slot = 0

    @property
    def pool_bytes(self) -> int:
        """The whole budget."""
        return self.slab_bytes * self.slab_count_max

    @property
    def bound_count(self) -> int:
        return len(self._set_of)

    @property
    def pending_count(self) -> int:
        """Slabs of the budget that the pool has not populated yet."""
        return self.slab_count_max - self.bound_count - len(self.stock)

    def put(self, slab: SlabId, node: int | None) -> None:
        """One more slab for the stock."""
        self.stock.append(slab)
        if node is not None:
            self._node_of[slab] = node

    def stock_count_on(self, node: int) -> int:
        return sum(self._node_of.get(slab) == node for slab in self.stock)

    def slot_count_of(self, slot_bytes: int) -> int:
        return self.slab_bytes // slot_bytes

    def bind(
        self,
        namespace: NamespaceId,
        *,
        shard_count: int,
        slot_bytes: int,
        now: float,
        near: int | None = None,
    ) -> SlabSet | None:
        """Bind one slab a shard from the stock, if there are as many: those on node `near` first,
        then in the order in which they came."""
        if len(self.stock) < shard_count:
            return None
        if near is not None:
            self.stock.sort(key=lambda slab: self._node_of.get(slab) != near)
        slabs = tuple(self.stock[:shard_count])
        del self.stock[:shard_count]
        nodes = {self._node_of.get(slab) for slab in slabs}
        bound = SlabSet(
            SlabSetId(self._next_set),
            namespace,
            slabs,
            self._next_slot,
            self.slot_count_of(slot_bytes),
            now,
            nodes.pop() if len(nodes) == 1 else None,
        )
        self._enter(bound)
        return bound

    def adopt(
        self,
        namespace: NamespaceId,
        slabs: tuple[SlabId, ...],
        slots: range,
        *,
        slot_next: int,
        now: float,
    ) -> SlabSet:
        """A set of the daemon's life before this one, which gave the numbers below `slot_next`."""
        assert all(
            slots.stop <= one.slot_first or one.slot_first + one.slot_count <= slots.start
            for one in self.sets.values()
        ), "slot numbers are given once"
        bound = SlabSet(SlabSetId(self._next_set), namespace, slabs, slots.start, len(slots), now)
        self._enter(bound)
        self._next_slot = max(self._next_slot, slot_next)
        return bound

    def _enter(self, bound: SlabSet) -> None:
        self._next_set += 1
        self._next_slot = max(self._next_slot, bound.slot_first + bound.slot_count)
        assert self._next_slot <= 1 << 32, "slot numbers are used up"
        self.sets[bound.slab_set] = bound
        for slab in bound.slabs:
            self._set_of[slab] = bound.slab_set
            bound.mapped_by[slab] = {}
            bound.offered_to[slab] = {}

    def set_with(self, slab: SlabId) -> SlabSet | None:
        found = self._set_of.get(slab)
        return None if found is None else self.sets[found]

    def sets_of(self, namespace: NamespaceId) -> list[SlabSet]:
        return [one for one in self.sets.values() if one.namespace == namespace]

    def are_gone(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of these slots were of sets that have been dropped: numbers are given once."""
        gone = slots < self._next_slot
        for one in self.sets.values():
            gone &= (slots < one.slot_first) | (slots >= one.slot_first + one.slot_count)
        return gone

    def remove(self, slab_set: SlabSetId) -> None:
        """Forget a set; its slabs leave the ledger (the pool will populate fresh ones)."""
        for slab in self.sets.pop(slab_set).slabs:
            del self._set_of[slab]
            self._node_of.pop(slab, None)

    def unmap_session(self, session: SessionId) -> None:
        for one in self.sets.values():
            for slab in one.slabs:
                one.note_unmapped(slab, session)

    def check_invariants(self) -> list[str]:
        known = [*self.stock, *self._set_of]
        if len(known) != len(set(known)):
            return ["a slab is in the stock and in a set"]
        if len(known) > self.slab_count_max:
            return ["more slabs than the budget allows"]
        return []
