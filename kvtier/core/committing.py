"""Commit and Abort: what becomes of reserved slots; and the checksums of what was committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import DAEMON_SESSION, EngineTable
from kvtier.core.index import NOBODY
from kvtier.core.ladder import Ladder
from kvtier.core.replica import READY, Places
from kvtier.core.residency import Residency
from kvtier.core.runs import runs_of
from kvtier.core.settings import ManagerConfig
from kvtier.core.shares import Shares
from kvtier.core.slices import CommittedSlice
from kvtier.errors import BadRequest, NotReserved
from kvtier.types import NamespaceId, SessionId, TierName


class Committing:
    """Part of the block manager; it has no state of its own."""

    def __init__(
        self,
        namespaces: Mapping[NamespaceId, Residency],
        engines: EngineTable,
        shares: Shares,
        ladder: Ladder,
        config: ManagerConfig,
    ) -> None:
        self._namespaces = namespaces
        self._engines = engines
        self._shares = shares
        self._ladder = ladder
        self._config = config

    def commit(self, event: ev.Commit, now: float) -> list[ins.Instruction]:
        residency = self._namespaces[event.namespace]
        if len(event.hashes) != len(event.slots):
            raise BadRequest(f"{len(event.hashes)} hashes for {len(event.slots)} slots")
        start, stop = event.done_count, event.done_count + self._config.slice_blocks
        # In each slice again: since the last one the session may have ended or aborted its slots.
        places = self._require_reserved(event.session, residency, event.slots[start:])
        self._shares.note_use(event.namespace, now)
        done = residency.commit(
            event.hashes[start:stop],
            places[: stop - start],
            parent=event.hashes[start - 1] if start else event.parent,
            void=event.epoch != residency.epoch,
            now=now,
        )
        outcomes = event.outcomes + done.outcomes
        found = self._tell_ready(event, residency, done) if len(done.ready) else []
        if stop < len(event.hashes):
            found.append(ins.Continue(replace(event, done_count=stop, outcomes=outcomes)))
        else:
            found.append(ins.Committed(outcomes, residency.epoch))
        return found

    def _tell_ready(
        self, event: ev.Commit, residency: Residency, done: CommittedSlice
    ) -> list[ins.Instruction]:
        """What the shell must know of blocks that became READY."""
        namespace = event.namespace
        slots = residency.tier.slots_of(done.ready)
        sequence = self._shares.sequence(len(slots))
        found: list[ins.Instruction] = [
            ins.WriteReady(namespace, slots, done.hashes, done.parents, residency.epoch, sequence)
        ]
        found.extend(
            ins.BlocksStored(namespace, TierName.DRAM, hashes, parent)
            for hashes, parent in runs_of(done.hashes, done.parents)
        )
        if event.checksums is None:
            residency.tier.pin_for_transfer(done.ready)
            found.append(ins.ComputeChecksums(namespace, slots))
        else:
            part = event.checksums[event.done_count :]
            found.append(ins.WriteChecksums(namespace, slots, part[done.ready_positions]))
            self._note_summed(residency, done.ready)
        return found

    def abort(self, event: ev.Abort, now: float) -> list[ins.Instruction]:
        residency = self._namespaces[event.namespace]
        places = self._require_reserved(event.session, residency, event.slots)
        there = places != NOBODY
        residency.tier.abort(places[there])
        return [
            ins.WriteGone(event.namespace, event.slots[there]),
            ins.Aborted(len(event.slots)),
        ]

    def _require_reserved(
        self, session: SessionId, residency: Residency, slots: ev.Slots
    ) -> Places:
        """The places of slots that the session is filling. NOBODY is where one of a set was that
        has been withdrawn and dropped meanwhile: whose it was nobody knows, and nobody needs to."""
        if session != DAEMON_SESSION:
            self._engines.require_live(session)
        allocator = residency.tier.allocator
        try:
            found = places = allocator.places_of(slots)
        except NotReserved:
            there = ~self._shares.are_gone(slots)
            found = np.full(len(slots), NOBODY, dtype=np.int32)
            slots = slots[there]
            found[there] = places = allocator.places_of(slots)
        # Not by sorting: a long list takes 30 times as long.
        named = np.zeros(allocator.place_count, dtype=np.bool_)
        named[places] = True
        if np.count_nonzero(named) != len(slots):
            raise NotReserved("a slot is named twice: name each reserved slot once")
        foreign = residency.tier.owner.take(places) != session
        if np.count_nonzero(foreign):
            raise NotReserved(
                f"slot {int(slots[foreign.argmax()])} is not reserved by this session (any more): "
                "commit or abort each reserved slot once"
            )
        return found

    def checksums_computed(self, event: ev.ChecksumsComputed, now: float) -> list[ins.Instruction]:
        residency = self._namespaces[event.namespace]
        tier = residency.tier
        places = tier.allocator.places_of(event.slots)
        ready = tier.state[places] == READY
        tier.unpin_transfer(places)
        slots = event.slots[ready]
        if not len(slots):
            return []
        self._note_summed(residency, places[ready])
        return [ins.WriteChecksums(event.namespace, slots, event.checksums[ready])]

    def _note_summed(self, residency: Residency, places: Places) -> None:
        residency.tier.summed[places] = True
        rows = residency.tier.row[places]
        if residency.index.sweep_pending:  # A doomed block still is READY until it is swept.
            resident = [row for row in rows.tolist() if residency.index.has_row(row)]
            rows = np.array(resident, dtype=np.int32)
        self._ladder.note_summed(residency, rows)
