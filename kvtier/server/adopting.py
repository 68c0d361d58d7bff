"""Adopting: what the life before left in memory becomes this life's, slabs first, blocks after.

Before anybody is answered: sessions, namespaces and slab sets, all of whose slots are held. After
READY, while calls are answered: the slot table is read in a thread, and the core takes its blocks
in slice by slice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from kvtier.core.events import (
    AdoptionEnded,
    BlocksAdopted,
    FreeAdopted,
    ReservedAdopted,
    SlabsAdopted,
)
from kvtier.errors import BadRequest, KVTierError
from kvtier.namespace import NamespaceSpec
from kvtier.pools.adopted import AdoptedSlots, adopted_slots
from kvtier.pools.dram import DramPool
from kvtier.pools.slabs import PageKind, Slab, adopt_slab
from kvtier.server.base import Base
from kvtier.server.epochs import EpochStore
from kvtier.server.inventory import Inventory, ParkedSet
from kvtier.server.keeping import Keeper
from kvtier.server.namespaces import OpenedNamespace
from kvtier.server.sessions import Sessions
from kvtier.server.slabs import SlabKeeper
from kvtier.server.threads import run_in_thread
from kvtier.types import Role, SessionId, SlabId

log = logging.getLogger(__name__)

# Slots told of in one event: some hundred microseconds.
FREE_SLICE_SLOTS = 65_536
# After the holds have ended.
SETTLED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Set:
    namespace: OpenedNamespace
    slots: range


class Adopter:
    """Runs once, at the start; lives on the event loop."""

    def __init__(
        self,
        base: Base,
        pool: DramPool,
        slabs: SlabKeeper,
        sessions: Sessions,
        keeper: Keeper,
        epochs: EpochStore,
        *,
        tenants: Collection[str] = ("",),
    ) -> None:
        """`tenants`: the names of those whose memory is taken over."""
        self._tenants = tenants
        self._base = base
        self._core = base.core
        self._pool = pool
        self._slabs = slabs
        self._sessions = sessions
        self._keeper = keeper
        self._epochs = epochs
        self._sets: list[_Set] = []
        self._hold_seconds = 0.0  # Of the life before.
        self.block_count = 0
        base.namespaces.tell_opened(
            lambda opened: keeper.keep_namespace(opened.spec.canonical_json())
        )

    async def begin(self, hold_seconds: float) -> None:
        """The core knows the sessions and slab sets when this returns. `hold_seconds`: how long a
        lease of this life runs at most, its margin included."""
        keeper, former = self._keeper, self._keeper.former
        slabs: dict[str, int] = {}
        if former is not None:
            keeper.begin_taking_over()
            inventory = former.inventory
            slabs = {
                slab.name: fd
                for one in inventory.sets
                for slab in one.slabs
                if (fd := keeper.take(slab.name)) is not None
            }
            self._sessions.revive(inventory.sessions, inventory.session_next)
        keeper.begin(self._pool.generation, self._pool.table.fd, hold_seconds)
        if former is None:
            return
        self._hold_seconds = former.inventory.hold_seconds
        self._slabs.skip_slabs(former.inventory.slab_next)
        await self._adopt_sets(former.inventory, slabs)
        for fd in slabs.values():
            os.close(fd)
        keeper.note_namespaces(
            opened.spec.canonical_json() for opened in self._base.namespaces.opened()
        )

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to take blocks in; returns at once."""
        if self._sets:
            tasks.create_task(self._take_in(), name="adopting")
        else:
            self._keeper.end_taking_over()

    # ------------------------------------------------------------------------------- slab sets

    async def _adopt_sets(self, inventory: Inventory, fds: dict[str, int]) -> None:
        wanted = {one.fingerprint for one in inventory.sets}
        namespaces: dict[str, OpenedNamespace] = {}
        for facts in inventory.namespaces:
            try:
                spec = NamespaceSpec(**json.loads(facts))
                if spec.tenant not in self._tenants:
                    raise BadRequest(f"{spec.tenant!r} is no tenant of this daemon any more")
                fingerprint = spec.fingerprint().hex()
                if fingerprint in wanted:
                    namespaces[fingerprint] = await self._base.namespaces.open(spec)
            except (KVTierError, TypeError, ValueError) as error:
                # A slab size that is too small now, or a build that knows other facts.
                log.warning("namespace not taken over", extra={"reason": str(error)})
        sessions = tuple(
            SessionId(one.session) for one in inventory.sessions if one.role != Role.SCHEDULER.name
        )
        for one in sorted(inventory.sets, key=lambda one: one.slot_first):
            try:
                namespace = namespaces.get(one.fingerprint)
                self._adopt_set(one, namespace, fds, inventory, sessions)
            except (BadRequest, OSError) as error:
                log.warning(
                    "slab set not taken over", extra={"first": one.slot_first, "reason": str(error)}
                )
                self._keeper.drop_set(one.slot_first)

    def _adopt_set(
        self,
        one: ParkedSet,
        namespace: OpenedNamespace | None,
        fds: dict[str, int],
        inventory: Inventory,
        sessions: tuple[SessionId, ...],
    ) -> None:
        """Raises BadRequest and OSError where that cannot be; nothing of it is adopted then."""
        if namespace is None:
            raise BadRequest("its namespace is not known")
        if any(slab.name not in fds for slab in one.slabs):
            raise BadRequest("one of its slabs is missing")
        if len(one.slabs) > self._slabs.room_count:
            raise BadRequest("the budget is smaller now")
        slab_bytes = self._slabs.slab_bytes
        if (one.slot_bytes, one.slot_count, one.shard_bytes, len(one.slabs)) != (
            namespace.slot_bytes,
            slab_bytes // namespace.slot_bytes,
            namespace.spec.shard_bytes,
            namespace.spec.shard_count,
        ) or any(os.fstat(fds[slab.name]).st_size != slab_bytes for slab in one.slabs):
            raise BadRequest("its slots lie in another way than this daemon would lay them")
        for slab in self._map(one, fds):
            self._slabs.adopt(slab)
        slots = range(one.slot_first, one.slot_first + one.slot_count)
        self._sets.append(_Set(namespace, slots))
        self._core.post(
            SlabsAdopted(
                namespace=namespace.id,
                slabs=tuple(SlabId(slab.slab) for slab in one.slabs),
                slot_first=one.slot_first,
                slot_count=one.slot_count,
                slot_next=inventory.slot_next,
                until=self._base.clock.now() + inventory.hold_seconds,
                sessions=sessions,
            )
        )

    def _map(self, one: ParkedSet, fds: dict[str, int]) -> list[Slab]:
        mapped: list[Slab] = []
        try:
            for slab in one.slabs:
                kind = PageKind(slab.page_kind)
                mapped.append(
                    adopt_slab(SlabId(slab.slab), fds[slab.name], kind, slab.huge_bytes, slab.node)
                )
        except OSError:
            for slab_mapped in mapped:
                slab_mapped.mapping.close()
            raise
        for slab in one.slabs:
            del fds[slab.name]  # The pool's from now on.
        return mapped

    # ---------------------------------------------------------------------------------- blocks

    async def _take_in(self) -> None:
        began_at = self._base.clock.now()
        found = await run_in_thread(self._read, "kvtier-adoption")
        self._tell_reserved(found)
        for one in self._sets:
            slots = found.free[(found.free >= one.slots.start) & (found.free < one.slots.stop)]
            for first in range(0, len(slots), FREE_SLICE_SLOTS):
                part = slots[first : first + FREE_SLICE_SLOTS]
                await self._core.run(FreeAdopted(one.namespace.id, part))
                await asyncio.sleep(0)
        namespaces = {one.namespace.fingerprint: one.namespace for one in self._sets}
        for adopted in found.namespaces:
            chains = adopted.chains
            namespace = namespaces.get(chains.fingerprint)
            if namespace is None or chains.hash_bytes != namespace.spec.hash_bytes:
                continue  # Of a set that is not there any more, or damaged: held, and void.
            self.block_count += len(chains.lower_slots)
            await self._core.run(
                BlocksAdopted(
                    namespace.id,
                    chains.epoch,
                    chains.packed,
                    chains.parents,
                    chains.lower_slots,
                    adopted.are_summed,
                    sequence_next=found.sequence_next,
                )
            )
        self._core.post(AdoptionEnded())
        log.info(
            "memory of the former life taken over",
            extra={
                "sets": len(self._sets),
                "blocks": self.block_count,
                "seconds": round(self._base.clock.now() - began_at, 3),
            },
        )
        # Then the last of it is like all other memory: it has ended nobody.
        await asyncio.sleep(self._hold_seconds + SETTLED_SECONDS)
        self._keeper.end_taking_over()

    def _read(self) -> AdoptedSlots:
        """In a thread: nobody writes to entries of adopted slots before they are told of."""
        ranges = [one.slots for one in self._sets]
        epochs = self._epochs.current_epochs()
        return adopted_slots(self._pool.table_ranges(ranges), self._pool.generation, epochs, ranges)

    def _tell_reserved(self, found: AdoptedSlots) -> None:
        former = self._keeper.former
        assert former is not None, "nothing is adopted without a former life"
        for engine, slots in found.reserved.items():
            holders = tuple(
                SessionId(one.session)
                for one in former.inventory.sessions
                if one.engine == engine.hex() and one.role != Role.WORKER.name
            )
            for one in self._sets:
                mine = slots[(slots >= one.slots.start) & (slots < one.slots.stop)]
                if len(mine):
                    self._core.post(
                        ReservedAdopted(one.namespace.id, np.sort(mine), tuple(sorted(holders)))
                    )
