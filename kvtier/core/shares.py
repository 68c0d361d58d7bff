"""Who gets which slots: slab sets for namespaces, slots for sessions, eviction when they run out.

A namespace grows by a slab set when it runs short and the stock has slabs; when all of the budget
is bound it evicts its own blocks, or takes a set from a namespace that is idle or has more than its
fair share. Slots are given to an engine only from sets that its workers have mapped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.balance import Balance
from kvtier.core.engines import DAEMON_SESSION, EngineTable, Session
from kvtier.core.replica import Places
from kvtier.core.residency import Residency
from kvtier.core.settings import ManagerConfig
from kvtier.core.slabs import SlabLedger, SlabSet
from kvtier.core.slots import Slots
from kvtier.core.tiers import Watermarks
from kvtier.types import (
    BlockHash,
    EngineId,
    NamespaceId,
    RemovedFor,
    SessionId,
    SlabSetId,
    TierName,
)


class Shares:
    """Part of the block manager, with its own slice of its state."""

    def __init__(
        self,
        ledger: SlabLedger,
        namespaces: Mapping[NamespaceId, Residency],
        engines: EngineTable,
        config: ManagerConfig,
    ) -> None:
        self._ledger = ledger
        self._namespaces = namespaces
        self._engines = engines
        self._config = config
        self._balance = Balance(ledger, namespaces, config)
        self.tenancy = self._balance.tenancy
        self._watermarks = Watermarks(config.watermark_start, config.watermark_stop)
        self._sequence = 0
        self._populated_at = 0.0
        self._wanting: dict[NamespaceId, None] = {}  # Ran short since they last grew.
        self._usable_sets: dict[tuple[EngineId, NamespaceId], frozenset[SlabSetId]] = {}
        self._near_sets: dict[tuple[int, NamespaceId], frozenset[SlabSetId]] = {}  # By node.

    # ----------------------------------------------------------------------------------- slabs

    def on_slab_populated(self, event: ev.SlabPopulated, now: float) -> list[ins.Instruction]:
        self._ledger.put(event.slab, event.node)
        self._populated_at = now
        return self._hand_out(now)

    def on_slab_mapped(self, event: ev.SlabMapped, now: float) -> list[ins.Instruction]:
        one = self._ledger.set_with(event.slab)
        session = self._engines.get(event.session)
        if one is not None and session is not None and session.live:
            one.note_mapped(event.slab, event.session)
            self.forget_mappings()
        return []

    def on_slab_unmapped(self, event: ev.SlabUnmapped, now: float) -> list[ins.Instruction]:
        one = self._ledger.set_with(event.slab)
        if one is None:
            return []
        one.note_unmapped(event.slab, event.session)
        self.forget_mappings()
        return self.drop_idle_sets(now)

    def on_namespace_joined(self, event: ev.NamespaceJoined, now: float) -> list[ins.Instruction]:
        session = self._engines.require_live(event.session)
        residency = self._namespaces[event.namespace]
        is_joined = event.namespace in session.namespaces
        session.namespaces[event.namespace] = None
        self.note_use(event.namespace, now)
        if is_joined or not session.maps_slots:
            return []  # What it was offered already it is not offered again.
        found: list[ins.Instruction] = [
            offer
            for one in self._ledger.sets_of(event.namespace)
            if not one.withdrawn
            for offer in self._offers(one, session)
        ]
        if not self._ledger.sets_of(event.namespace):
            self._wanting[event.namespace] = None
            found.extend(self._hand_out(now, event.namespace, session.node))
            found.extend(self._rebalance(residency, now))
        return found

    def on_withdraw_slab_set(self, event: ev.WithdrawSlabSet, now: float) -> list[ins.Instruction]:
        one = self._ledger.sets.get(event.slab_set)
        if one is None or one.withdrawn:
            return []
        return [*self._withdraw(one, now), ins.Continue(ev.SweepVoid())]

    @property
    def empties_sets(self) -> bool:
        """Whether `empty_withdrawn` has something to do."""
        return any(one.withdrawn and not one.is_void() for one in self._ledger.sets.values())

    def empty_withdrawn(self) -> list[ins.Instruction] | None:
        """Void a slice of a withdrawn set's slots; None when there is nothing left to void."""
        for one in self._ledger.sets.values():
            if not one.withdrawn or one.is_void():
                continue
            residency = self._namespaces[one.namespace]
            start = one.voided_count
            one.voided_count = min(one.slot_count, start + self._config.slice_blocks)
            places = residency.tier.allocator.places_of_set(one.slab_set)
            hashes = residency.void_places(places[start : one.voided_count])
            if not hashes:
                return []
            return [ins.BlocksRemoved(one.namespace, TierName.DRAM, hashes, RemovedFor.SLAB)]
        return None

    def forget_mappings(self) -> None:
        """Which sets an engine can use is worked out anew at its next call."""
        self._usable_sets.clear()
        self._near_sets.clear()

    def drop_idle_sets(self, now: float) -> list[ins.Instruction]:
        """Give up withdrawn sets that nobody maps and whose slots are all free."""
        found: list[ins.Instruction] = []
        for one in list(self._ledger.sets.values()):
            if not one.is_void() or one.is_held():
                continue
            tier = self._namespaces[one.namespace].tier
            allocator = tier.allocator
            if not allocator.is_idle(one.slab_set):
                # Who was filling a slot cannot write there any more, so that nobody can keep a
                # slab by leaving one slot of it uncommitted.
                late = [it for it in tier.reserved_by if self._engines.may_write_late(it, now)]
                tier.end_reservations(allocator.places_of_set(one.slab_set), but_of=late)
            if allocator.is_idle(one.slab_set):
                allocator.remove_set(one.slab_set)
                self._ledger.remove(one.slab_set)
                found.append(ins.DropSlabs(one.slab_set, one.slabs))
        return found

    def are_gone(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of these slots were of sets that have been dropped."""
        return self._ledger.are_gone(slots)

    def note_use(self, namespace: NamespaceId, now: float) -> None:
        self._balance.note_use(namespace, now)

    def usable(self, session: SessionId, namespace: NamespaceId) -> Collection[SlabSetId] | None:
        """Slab sets whose slots this session may be given; None means all (the daemon itself)."""
        if session == DAEMON_SESSION:
            return None
        engine = self._engines.require_live(session).engine
        key = (engine, namespace)
        found = self._usable_sets.get(key)
        if found is None:
            found = frozenset(
                one.slab_set
                for one in self._ledger.sets_of(namespace)
                if self._is_mapped_whole(one, engine)
            )
            self._usable_sets[key] = found
        return found

    # ----------------------------------------------------------------------------------- slots

    def share_bytes(self, tenant: str, now: float) -> int:
        """Of memory, what the tenant may have now."""
        return self._balance.share_bytes(tenant, now)

    def lease_count_max(self, residency: Residency, now: float) -> int:
        """Blocks of this namespace that leases may pin: what others left of half the pool, and its
        tenant's of half of what that may have."""
        others = [one for one in self._namespaces.values() if one is not residency]
        fraction_max, tenant = self._config.pin_fraction_max, residency.facts.tenant
        pool_bytes = self._ledger.pool_bytes
        room_bytes = pool_bytes * fraction_max - sum(one.leased_bytes for one in others)
        if not self.tenancy.is_alone:
            own_bytes = self.share_bytes(tenant, now)
            leased_bytes = sum(one.leased_bytes for one in others if one.facts.tenant == tenant)
            room_bytes = min(room_bytes, own_bytes * fraction_max - leased_bytes)
        return max(0, int(room_bytes // residency.facts.block_bytes))

    def reserve(
        self, event: ev.Reserve, residency: Residency, engine: EngineId | None, now: float
    ) -> list[ins.Instruction]:
        """Take up to `event.count` slots, growing or evicting for them."""
        tier = residency.tier
        usable = self.usable(event.session, event.namespace)
        node = self._engines.node_of(event.session)
        found = self._grow_near(residency, node, event.count, now)
        free_count = tier.allocator.free_count_in(usable)
        if free_count < event.count:
            self._wanting[event.namespace] = None
            found.extend(self._hand_out(now, event.namespace, node))
            free_count = tier.allocator.free_count_in(usable)
        stock_count_max = self._stock_count_max(residency, now)
        held_count = tier.reserved_by.get(event.session, 0)
        wanted = min(event.count, max(0, stock_count_max - held_count))
        if free_count < wanted and not self._growth_expected(residency, usable, now):
            missing = min(wanted - free_count, self._config.evict_slice_blocks)
            hashes = residency.evict(missing)
            if hashes:
                found.append(_made_room(residency, hashes))
            if len(hashes) == self._config.evict_slice_blocks:
                return [*found, ins.Continue(event)]
            found.extend(self._rebalance(residency, now))
            found.extend(self._recalls(residency, event.session, stock_count_max))
        free_count = tier.allocator.free_count_in(usable)
        near = self._near(residency, node)
        places = tier.reserve(min(wanted, free_count), event.session, usable, near)
        slots = tier.slots_of(places)
        if len(slots):
            found.append(ins.WriteReserved(event.namespace, slots, engine))
        found.append(ins.SlotsReserved(slots, residency.epoch, stock_count_max))
        # A set that was withdrawn to make room is emptied after the answer.
        return sorted(found, key=lambda one: isinstance(one, ins.Continue))

    def take_for_promotion(
        self, residency: Residency, session: SessionId, count: int, now: float
    ) -> tuple[Places, list[ins.Instruction]]:
        """Take up to `count` slots that the session may use, evicting for them; at most a slice."""
        tier = residency.tier
        usable = self.usable(session, residency.facts.namespace)
        node = self._engines.node_of(session)
        count = min(count, self.promoted_slice_blocks)
        found = self._grow_near(residency, node, count, now)
        if tier.allocator.free_count_in(usable) < count:
            self._wanting[residency.facts.namespace] = None
            found.extend(self._hand_out(now, residency.facts.namespace, node))
            missing = count - tier.allocator.free_count_in(usable)
            if missing > 0 and not self._growth_expected(residency, usable, now):
                found.extend(self._take_back(residency, now) or ())  # Emptied by the next sweep.
            hashes = residency.evict(missing) if missing > 0 else []
            if hashes:
                found.append(_made_room(residency, hashes))
        free_count = tier.allocator.free_count_in(usable)
        near = self._near(residency, node)
        return tier.reserve(min(count, free_count), DAEMON_SESSION, usable, near), found

    @property
    def promoted_slice_blocks(self) -> int:
        """Slots that are taken for promotion at once: for each a block may have to be evicted."""
        return self._config.evict_slice_blocks

    @property
    def pool_bytes(self) -> int:
        """The whole DRAM budget."""
        return self._ledger.pool_bytes

    def sequence(self, count: int) -> int:
        """The first of `count` numbers for entries of the slot table, higher than all before."""
        first = self._sequence
        self._sequence += count
        return first

    def skip_sequence(self, sequence_next: int) -> None:
        """The numbers below this one are in the table already."""
        self._sequence = max(self._sequence, sequence_next)

    def keep_watermarks(self) -> list[ins.Instruction]:
        """Evict ahead of need where a namespace is above its start mark."""
        found: list[ins.Instruction] = []
        for residency in self._namespaces.values():
            allocator = residency.tier.allocator
            if not allocator.slot_count or self._ledger.pending_count or self._ledger.stock:
                continue
            count = self._watermarks.eviction_count(
                slot_count=allocator.slot_count, free_count=allocator.free_count
            )
            hashes = residency.evict(min(count, self._config.evict_slice_blocks))
            if hashes:
                found.append(_made_room(residency, hashes))
        return found

    # --------------------------------------------------------------------------------- helpers

    def _near(self, residency: Residency, node: int | None) -> Collection[SlabSetId]:
        """The namespace's sets that lie on this node."""
        if node is None:
            return ()
        key = (node, residency.facts.namespace)
        found = self._near_sets.get(key)
        if found is None:
            sets = self._ledger.sets_of(residency.facts.namespace)
            found = frozenset(one.slab_set for one in sets if one.node == node)
            self._near_sets[key] = found
        return found

    def _grow_near(
        self, residency: Residency, node: int | None, count: int, now: float
    ) -> list[ins.Instruction]:
        """Grow on the engine's own node before far slots are used, while the stock allows."""
        if node is None or self._ledger.stock_count_on(node) < residency.facts.shard_count:
            return []
        if residency.tier.allocator.free_count_in(self._near(residency, node)) >= count:
            return []
        if not self._balance.is_owed(residency, now):
            return []  # Who is poorer may be waiting for it.
        return self._grow(residency, now, node)

    def _hand_out(
        self, now: float, asking: NamespaceId | None = None, node: int | None = None
    ) -> list[ins.Instruction]:
        """The stock goes to those who want it, the poorest first; `asking` would have it on
        `node`."""
        found: list[ins.Instruction] = []
        if not self._ledger.stock:
            return found
        for namespace in self._balance.poorest_first(self._wanting, now):
            residency = self._namespaces[namespace]
            grown = self._grow(residency, now, node if namespace == asking else None)
            is_coming = self._ledger.pending_count or self._balance.promised_count(namespace, now)
            if not grown and is_coming and self._balance.may_grow(residency):
                break  # It needs more slabs at once, and they are on their way.
            found.extend(grown)
        return found

    def _grow(
        self, residency: Residency, now: float, node: int | None = None
    ) -> list[ins.Instruction]:
        facts = residency.facts
        if not self._balance.may_grow(residency):
            self._wanting.pop(facts.namespace, None)
            return []
        one = self._ledger.bind(
            facts.namespace,
            shard_count=facts.shard_count,
            slot_bytes=facts.slot_bytes,
            now=now,
            near=node,
        )
        if one is None:
            return []
        self._wanting.pop(facts.namespace, None)
        residency.tier.add_set(one.slab_set, one.slot_first)
        self.forget_mappings()
        found: list[ins.Instruction] = [
            ins.BindSlabs(facts.namespace, one.slab_set, one.slabs, one.slot_first, one.slot_count)
        ]
        for session in self._engines.sessions():
            if session.maps_slots and facts.namespace in session.namespaces:
                found.extend(self._offers(one, session))
        return found

    def _offers(self, one: SlabSet, session: Session) -> list[ins.Instruction]:
        found: list[ins.Instruction] = []
        for shard in session.shards:
            if shard < len(one.slabs):
                slab = one.slabs[shard]
                one.offered_to[slab][session.session] = None
                found.append(ins.OfferSlab(session.session, slab, shard))
                self.forget_mappings()
        return found

    def _is_mapped_whole(self, one: SlabSet, engine: EngineId) -> bool:
        """Whether live sessions of the engine map the set's slabs of all shards: of those that
        hold the same shard all that were offered its slab, for all of them load it."""
        return not one.withdrawn and all(
            any(self._is_live_of(session, engine) for session in one.mapped_by[slab])
            and not any(self._is_live_of(session, engine) for session in one.offered_to[slab])
            for slab in one.slabs
        )

    def _is_live_of(self, session: SessionId, engine: EngineId) -> bool:
        found = self._engines.get(session)
        return found is not None and found.live and found.engine == engine

    def _growth_expected(
        self, residency: Residency, usable: Collection[SlabSetId] | None, now: float
    ) -> bool:
        """Whether more slots will be usable soon, so that evicting would be premature.

        Likewise while the engine has not mapped all sets: what is evicted might lie in another.
        """
        since = now - self._config.growth_wait_seconds
        ledger = self._ledger
        under_way = ledger.pending_count >= residency.facts.shard_count - len(ledger.stock)
        under_way = under_way and self._balance.is_owed(residency, now)
        if ledger.pending_count and under_way and self._populated_at > since:
            return True
        return usable is not None and any(
            one.slab_set not in usable and not one.withdrawn
            for one in ledger.sets_of(residency.facts.namespace)
        )

    def _stock_count_max(self, residency: Residency, now: float) -> int:
        if residency.is_erasing:
            return 0
        tenant = residency.facts.tenant
        sessions = max(1, self._engines.scheduler_count(tenant))
        own_bytes = self.share_bytes(tenant, now)
        pool_count = own_bytes // residency.facts.block_bytes
        # A namespace that has not grown yet must not be held by the stock of one of several.
        mine_count = residency.tier.allocator.slot_count // sessions
        return max(1, min(pool_count // (self._config.stock_divisor * sessions), mine_count))

    def _recalls(
        self, residency: Residency, asking: SessionId, stock_count_max: int
    ) -> list[ins.Instruction]:
        return [
            ins.RecallSlots(session, residency.facts.namespace, count - stock_count_max)
            for session, count in residency.tier.reserved_by.items()
            if session not in (asking, DAEMON_SESSION) and count > stock_count_max
        ]

    def _rebalance(self, residency: Residency, now: float) -> list[ins.Instruction]:
        """As `_take_back`, and what is taken is emptied at once."""
        found = self._take_back(residency, now)
        return [] if found is None else [*found, ins.Continue(ev.SweepVoid())]

    def _take_back(self, residency: Residency, now: float) -> list[ins.Instruction] | None:
        """Take one set's worth from who has more than its fair share, if this namespace has less:
        from another tenant first. None when nothing is taken."""
        ledger, facts = self._ledger, residency.facts
        found: list[ins.Instruction] = []
        if ledger.pending_count and self._populated_at > now - self._config.growth_wait_seconds:
            return None
        first_count = len(ledger.stock) + self._balance.promised_count(facts.namespace, now)
        coming_count = first_count
        while coming_count < facts.shard_count:
            one = self._balance.victim(residency, now)
            if one is None:
                break
            found.extend(self._withdraw(one, now, facts.namespace))
            coming_count += len(one.slabs)
        return None if coming_count == first_count else found

    def _withdraw(
        self, one: SlabSet, now: float, promised_to: NamespaceId | None = None
    ) -> list[ins.Instruction]:
        residency = self._namespaces[one.namespace]
        allocator = residency.tier.allocator
        one.withdrawn, one.withdrawn_at, one.promised_to = True, now, promised_to
        allocator.withdraw(one.slab_set)
        self.forget_mappings()
        found: list[ins.Instruction] = []
        for shard, slab in enumerate(one.slabs):
            found.extend(ins.WithdrawSlab(session, slab, shard) for session in one.holders_of(slab))
        owners = np.unique(residency.tier.owner[allocator.places_of_set(one.slab_set)])
        found.extend(
            ins.RecallSlots(SessionId(owner), one.namespace, one.slot_count)
            for owner in owners.tolist()
            if owner > DAEMON_SESSION
        )
        return found


def _made_room(residency: Residency, hashes: Sequence[BlockHash]) -> ins.Instruction:
    return ins.BlocksRemoved(residency.facts.namespace, TierName.DRAM, hashes, RemovedFor.ROOM)
