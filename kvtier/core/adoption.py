"""What a daemon takes over from its life before: slab sets that it finds filled.

Leases of that life are not known any more, and whoever holds one may read until its deadline; so
every slot of an adopted set is *held* from the first moment on, and only what is known to be unused
is let go of. At `until`, when the last such lease must have ended, the holds end, but not before
all has been read: a slow machine would forget what it has not come to. Until then an adopted block
can be leased and copied down like any other, but its slot is given to nobody.

Slots that an engine was filling belong to the session that was; they come back when its quarantine
ends, like those of a session that was lost a moment ago.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import EngineTable
from kvtier.core.index import NOBODY, Rows
from kvtier.core.replica import GONE, Places
from kvtier.core.residency import Residency
from kvtier.core.shares import Shares
from kvtier.core.slabs import SlabLedger
from kvtier.core.taking_in import after_slice, begin_slice, find_resident, parent_codes
from kvtier.types import BlockHash, NamespaceId, PackedHashes, SessionId, SlabSetId, TierName

# Blocks taken in between two turns of the event loop: 2.5 ms, measured at a million.
ADOPTED_SLICE_BLOCKS = 1024

Mask = npt.NDArray[np.bool_]
Handler = Callable[[Any, float], list[ins.Instruction]]


class Adoption:
    """Part of the block manager. Invariant: a slot that is held has a transfer pin for that."""

    def __init__(
        self,
        namespaces: Mapping[NamespaceId, Residency],
        ledger: SlabLedger,
        shares: Shares,
        engines: EngineTable,
    ) -> None:
        self._namespaces = namespaces
        self._ledger = ledger
        self._shares = shares
        self._engines = engines
        self._until: dict[SlabSetId, float] = {}
        self._is_reading = False
        self._heirs: dict[SessionId, SessionId] = {}
        self._held: dict[NamespaceId, Mask] = {}  # By place.

    def handlers(self) -> dict[type, Handler]:
        return {
            ev.SlabsAdopted: self._on_slabs,
            ev.BlocksAdopted: self._on_blocks,
            ev.ReservedAdopted: self._on_reserved,
            ev.FreeAdopted: self._on_free,
            ev.AdoptionEnded: self._on_ended,
        }

    def heir(self, session: SessionId) -> SessionId | None:
        """Who withholds the slots of this session, whose quarantine is over: the table names the
        engine only, and another of its sessions may have been the one that was filling them."""
        following = self._heirs.get(session)
        return None if following is None else self._quarantined(following)

    def next_deadline(self) -> float | None:
        return None if self._is_reading else min(self._until.values(), default=None)

    def is_due(self, now: float) -> bool:
        """Whether `expire_one` has something to do."""
        return not self._is_reading and any(until <= now for until in self._until.values())

    def expire_one(self, now: float) -> None:
        """No lease of the former life is running any more: the slots of one set, which is a slice
        of the work, are like all others."""
        slab_set = next(one for one, until in self._until.items() if until <= now)
        del self._until[slab_set]
        found = self._ledger.sets.get(slab_set)
        if found is None:
            return  # All of it was free, and it has been given up since.
        residency = self._namespaces[found.namespace]
        places = residency.tier.allocator.places_of_set(slab_set)
        self._let_go(residency.facts.namespace, places)
        residency.announce_leaves(places)

    def check_invariants(self) -> list[str]:
        found = []
        for namespace, held in self._held.items():
            tier = self._namespaces[namespace].tier
            places = np.flatnonzero(held).astype(np.int32)
            if (tier.transfer_pins[places] < 1).any():
                found.append(f"namespace {namespace}: an adopted slot is held without a pin")
            if not self._until and len(places):
                found.append(f"namespace {namespace}: an adopted slot is held for ever")
        return found

    # ---------------------------------------------------------------------------------- events

    def _on_slabs(self, event: ev.SlabsAdopted, now: float) -> list[ins.Instruction]:
        residency = self._namespaces[event.namespace]
        tier = residency.tier
        assert event.slot_count == tier.allocator.set_slot_count, "a set of another geometry"
        slots = range(event.slot_first, event.slot_first + event.slot_count)
        one = self._ledger.adopt(
            event.namespace, event.slabs, slots, slot_next=event.slot_next, now=now
        )
        for session in event.sessions:
            found = self._engines.get(session)
            if found is not None and found.process.may_touch_slots:
                for shard in found.shards:
                    if shard < len(one.slabs):
                        one.mapped_by[one.slabs[shard]][session] = None
        tier.add_set(one.slab_set, one.slot_first)
        places = tier.allocator.take_set(one.slab_set)
        tier.pin_for_transfer(places)
        held = np.zeros(tier.allocator.place_count, dtype=np.bool_)
        before = self._held.get(event.namespace)
        if before is not None:
            held[: len(before)] = before
        held[places] = True
        self._held[event.namespace] = held
        self._until[one.slab_set] = event.until
        self._is_reading = True
        self._shares.forget_mappings()
        return [
            ins.BindSlabs(event.namespace, one.slab_set, one.slabs, one.slot_first, one.slot_count)
        ]

    def _on_blocks(self, event: ev.BlocksAdopted, now: float) -> list[ins.Instruction]:
        residency = self._namespaces[event.namespace]
        self._shares.skip_sequence(event.sequence_next)
        if event.epoch != residency.epoch:
            return []  # Cleared since: the slots stay held, and hold nothing.
        event, rows = begin_slice(event, residency)
        start = event.done_count
        stop = min(start + ADOPTED_SLICE_BLOCKS, len(event.slots))
        size = residency.facts.hash_bytes
        hashes = PackedHashes(event.packed[start * size : stop * size], size)
        kept = self._take_in(residency, event, rows, hashes[:], now)
        found: list[ins.Instruction] = []
        slots = event.slots[start:stop]
        unsummed = slots[kept & ~event.are_summed[start:stop]]
        if kept.any():
            found.append(ins.BlocksTakenIn(event.namespace, TierName.DRAM, hashes, kept))
        if len(unsummed):
            tier = residency.tier
            places = tier.allocator.places_of(unsummed)
            tier.summed[places] = False
            tier.pin_for_transfer(places)
            found.append(ins.ComputeChecksums(event.namespace, unsummed))
        if stop < len(event.slots):
            found.append(ins.Continue(after_slice(event, residency, rows, stop)))
        return found

    def _on_reserved(self, event: ev.ReservedAdopted, now: float) -> list[ins.Instruction]:
        self._heirs.update(pairwise(event.sessions))
        owner = self._quarantined(event.sessions[0]) if event.sessions else None
        if owner is None:
            return []  # Its engine is proven dead by now; the holds end soon enough.
        tier = self._namespaces[event.namespace].tier
        places = self._void_places(event.namespace, event.slots)
        tier.adopt_reserved(places, owner)
        self._let_go(event.namespace, places)
        return []

    def _on_free(self, event: ev.FreeAdopted, now: float) -> list[ins.Instruction]:
        self._let_go(event.namespace, self._void_places(event.namespace, event.slots))
        return [*self._shares.drop_idle_sets(now), ins.WriteGone(event.namespace, event.slots)]

    def _on_ended(self, event: ev.AdoptionEnded, now: float) -> list[ins.Instruction]:
        self._is_reading = False
        return []

    # --------------------------------------------------------------------------------- helpers

    def _quarantined(self, session: SessionId) -> SessionId | None:
        """This session, or the first of those behind it that is in quarantine still."""
        found: SessionId | None = session
        while found is not None and not self._engines.is_quarantined(found):
            found = self._heirs.get(found)
        return found

    def _take_in(
        self,
        residency: Residency,
        event: ev.BlocksAdopted,
        rows: Rows,
        hashes: list[BlockHash],
        now: float,
    ) -> Mask:
        """Enter those blocks of a slice whose parent is resident and that are not in memory yet;
        which ones these are."""
        index, start = residency.index, event.done_count
        slots = event.slots[start : start + len(hashes)]
        places = residency.tier.allocator.places_of(slots)
        void = self._are_void(event.namespace, places)
        for one in self._ledger.sets_of(event.namespace):
            if one.withdrawn:  # It is being emptied: nothing is to come into it.
                void &= (slots < one.slot_first) | (slots >= one.slot_first + one.slot_count)
        mine = rows[start : start + len(hashes)]  # A view.
        find_resident(event, index, hashes, mine)
        kept: Mask = void & (mine != NOBODY)
        kept[kept] = index.place[mine[kept]] == NOBODY
        codes, fresh = parent_codes(event, residency, rows, start, void & (mine == NOBODY))
        chosen = np.flatnonzero(fresh)
        new = hashes if fresh.all() else [hashes[one] for one in chosen.tolist()]
        mine[chosen] = index.adopt_bare(new, codes[chosen])
        kept |= fresh
        residency.adopt(mine[kept], places[kept], now)
        return kept

    def _are_void(self, namespace: NamespaceId, places: Places) -> Mask:
        """Which of these slots are held and nothing else."""
        residency = self._namespaces[namespace]
        void: Mask = self._held[namespace][places]
        void &= residency.tier.state[places] == GONE
        void &= residency.tier.owner[places] == NOBODY
        return void

    def _void_places(self, namespace: NamespaceId, slots: ev.Slots) -> Places:
        places = self._namespaces[namespace].tier.allocator.places_of(slots)
        return places[self._are_void(namespace, places)]

    def _let_go(self, namespace: NamespaceId, places: Places) -> None:
        held = self._held[namespace]
        places = places[held[places]]
        held[places] = False
        self._namespaces[namespace].tier.unpin_transfer(places)
