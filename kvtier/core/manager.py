"""The block manager: events in, instructions out. No I/O, no clock, no chance.

It owns what is decided about blocks: which are resident and where, who holds them, what goes when
room is needed, which namespace owns which slab. It is driven by the daemon's event loop, by the
simulator and by the model tests alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.audit import find_violations, gather_stats
from kvtier.core.engines import DAEMON_SESSION, EngineTable, QuietAsked
from kvtier.core.leases import Lease, LeaseTable
from kvtier.core.replica import ReplicaState
from kvtier.core.residency import CommittedSlice, NamespaceFacts, Residency
from kvtier.core.settings import ManagerConfig
from kvtier.core.shares import Shares
from kvtier.core.slabs import SlabLedger
from kvtier.core.stats import ManagerStats
from kvtier.errors import (
    BadRequest,
    Draining,
    LimitExceeded,
    NotReserved,
    UnknownNamespace,
)
from kvtier.policy.eviction import EvictionPolicy
from kvtier.types import (
    BlockHash,
    Cut,
    LeaseId,
    NamespaceId,
    PackedHashes,
    PrefixMatch,
    SessionId,
    TierName,
)


class BlockManager:
    """See the module. Requests that cannot be served raise a KVTierError and change nothing."""

    def __init__(self, config: ManagerConfig, *, make_policy: Callable[[], EvictionPolicy]) -> None:
        self._config = config
        self._make_policy = make_policy
        self._namespaces: dict[NamespaceId, Residency] = {}
        self._engines = EngineTable(grace_seconds=config.grace_seconds)
        self._leases = LeaseTable(margin_seconds=config.lease_margin_seconds)
        self._ledger = SlabLedger(
            slab_bytes=config.slab_bytes, slab_count_max=config.slab_count_max
        )
        self._shares = Shares(self._ledger, self._namespaces, self._engines, config)
        self._sequence = 0
        self._draining = False
        self._handlers: dict[type, Callable[[Any, float], list[ins.Instruction]]] = {
            ev.NamespaceOpened: self._on_namespace_opened,
            ev.SlabPopulated: self._shares.on_slab_populated,
            ev.SlabMapped: self._shares.on_slab_mapped,
            ev.SlabUnmapped: self._shares.on_slab_unmapped,
            ev.Clear: self._on_clear,
            ev.SessionOpened: self._on_session_opened,
            ev.NamespaceJoined: self._shares.on_namespace_joined,
            ev.SessionLost: self._on_session_lost,
            ev.ProcessDied: self._on_process_died,
            ev.SessionQuiet: self._on_session_quiet,
            ev.SessionEnded: self._on_session_ended,
            ev.Acquire: self._on_acquire,
            ev.Release: self._on_release,
            ev.Reserve: self._on_reserve,
            ev.Commit: self._on_commit,
            ev.Abort: self._on_abort,
            ev.Evict: self._on_evict,
            ev.HintSessionEnd: self._on_hint_session_end,
            ev.ChecksumsComputed: self._on_checksums_computed,
            ev.SlotsCorrupt: self._on_slots_corrupt,
            ev.WithdrawSlabSet: self._shares.on_withdraw_slab_set,
            ev.Tick: self._on_tick,
            ev.DrainStarted: self._on_drain_started,
            ev.DrainEnded: self._on_drain_ended,
            ev.SweepVoid: self._on_sweep_void,
        }

    def handle(self, event: ev.Event, now: float) -> list[ins.Instruction]:
        """Work off one event (or one slice of it)."""
        return self._handlers[type(event)](event, now)

    # ------------------------------------------------------------------------------- questions

    def match_packed(self, namespace: NamespaceId, packed: bytes) -> PrefixMatch:
        """The longest resident prefix; a hint that changes nothing."""
        residency = self._residency(namespace)
        hash_bytes = residency.facts.hash_bytes
        if len(packed) % hash_bytes:
            raise BadRequest(f"{len(packed)} bytes of hashes: send a multiple of {hash_bytes}")
        count = residency.index.match(PackedHashes(packed, hash_bytes))
        return PrefixMatch(count, count, ((TierName.DRAM, count),) if count else ())

    def namespace_epoch(self, namespace: NamespaceId) -> int:
        return self._residency(namespace).epoch

    def next_deadline(self) -> float | None:
        """When a Tick will have something to do by time alone; None when nothing waits."""
        times = [self._leases.next_expiry(), self._engines.next_ready()]
        return min((time for time in times if time is not None), default=None)

    def stats(self) -> ManagerStats:
        return gather_stats(
            self._namespaces, self._engines, self._leases, self._ledger, draining=self._draining
        )

    def check_invariants(self) -> list[str]:
        """What is wrong, one line each; empty when all is well. Called after every test step."""
        return find_violations(self._namespaces, self._engines, self._leases, self._ledger)

    # -------------------------------------------------------------------- namespaces, sessions

    def _on_namespace_opened(self, event: ev.NamespaceOpened, now: float) -> list[ins.Instruction]:
        if event.namespace in self._namespaces:
            return []
        set_slot_count = self._ledger.slot_count_of(event.slot_bytes)
        if set_slot_count == 0:
            raise BadRequest(
                f"a block of {event.slot_bytes} bytes does not fit a slab of "
                f"{self._ledger.slab_bytes} bytes: raise dram.slab_bytes"
            )
        self._namespaces[event.namespace] = Residency(
            NamespaceFacts(event.namespace, event.hash_bytes, event.slot_bytes, event.shard_count),
            epoch=event.epoch,
            set_slot_count=set_slot_count,
            make_policy=self._make_policy,
        )
        self._shares.note_use(event.namespace, now)
        return []

    def _on_clear(self, event: ev.Clear, now: float) -> list[ins.Instruction]:
        residency = self._residency(event.namespace)
        assert event.epoch != residency.epoch, "an epoch was used twice"
        voided_count = residency.clear(event.epoch)
        return [
            ins.NamespaceCleared(event.namespace, event.epoch),
            ins.Cleared(event.namespace, event.epoch, voided_count),
            ins.Continue(ev.SweepVoid()),
        ]

    def _on_session_opened(self, event: ev.SessionOpened, now: float) -> list[ins.Instruction]:
        self._engines.open(
            event.session,
            engine=event.engine,
            role=event.role,
            shards=event.shards,
            by_value=event.by_value,
            replaces=event.replaces,
        )
        if event.replaces is None:
            return []
        return self._end_session(event.replaces, now)

    def _on_session_lost(self, event: ev.SessionLost, now: float) -> list[ins.Instruction]:
        return self._end_session(event.session, now)

    def _on_process_died(self, event: ev.ProcessDied, now: float) -> list[ins.Instruction]:
        return self._end_process(event.session, now, dead=True)

    def _on_session_ended(self, event: ev.SessionEnded, now: float) -> list[ins.Instruction]:
        return self._end_process(event.session, now, dead=False)

    def _on_session_quiet(self, event: ev.SessionQuiet, now: float) -> list[ins.Instruction]:
        session, about = self._engines.get(event.session), self._engines.get(event.about)
        if session and about and about.process is session.process and not about.live:
            # Its new session maps slabs anew; under the old one it touches nothing any more.
            self._ledger.unmap_session(event.about)
        self._engines.declare_quiet(event.session, event.about)
        self._finish_quarantines(now)
        return [
            ins.AcknowledgeQuiet(event.session, event.about),
            *self._shares.drop_idle_sets(),
        ]

    def _end_session(self, session: SessionId, now: float) -> list[ins.Instruction]:
        asked = self._engines.end_session(session, now)
        self._shares.forget_mappings()
        self._finish_quarantines(now)
        return _quiet_requests(asked)

    def _end_process(self, session: SessionId, now: float, *, dead: bool) -> list[ins.Instruction]:
        found = self._engines.get(session)
        if found is None:
            return []
        engine = found.engine
        mine = self._engines.sessions_of_process(session)
        asked = self._engines.end_process(session, now, dead=dead)
        for one in mine:
            self._ledger.unmap_session(one)
        self._shares.forget_mappings()
        if self._engines.is_engine_gone(engine):
            for lease in self._leases.end_engine(engine):
                self._unpin(lease)
        self._finish_quarantines(now)
        return [*_quiet_requests(asked), *self._shares.drop_idle_sets()]

    def _finish_quarantines(self, now: float) -> None:
        for session in self._engines.take_finished(now):
            for residency in self._namespaces.values():
                tier = residency.tier
                if session in tier.reserved_by:
                    tier.abort(tier.places_reserved_by(session))
            self._ledger.unmap_session(session)  # Its process is quiet about it, or dead.
            self._engines.forget(session)

    # ---------------------------------------------------------------------------------- leases

    def _on_reserve(self, event: ev.Reserve, now: float) -> list[ins.Instruction]:
        residency = self._residency(event.namespace)
        if self._draining:
            raise Draining("the daemon is shutting down: no new offloads")
        if event.count < 1:
            raise BadRequest(f"reserve {event.count} slots: ask for at least one")
        engine = None
        if event.session != DAEMON_SESSION:
            engine = self._engines.require_slots(event.session, event.namespace).engine
        self._shares.note_use(event.namespace, now)
        return self._shares.reserve(event, residency, engine, now)

    def _on_acquire(self, event: ev.Acquire, now: float) -> list[ins.Instruction]:
        residency = self._residency(event.namespace)
        if event.lease is None:
            lease = self._begin_lease(event, residency, now)
            if lease is None:
                return [self._no_lease(residency, event, Cut.DRAINING)]
        else:
            lease = self._leases.get(event.lease)
            if lease is None or lease.void_count != residency.void_count:
                # It expired, its engine died, or blocks were voided between two slices: those
                # that it holds already may be among them. What is in doubt is a miss.
                self._end_lease(event.lease)
                return [self._no_lease(residency, event, Cut.MISS)]
        start = event.done_count
        part = event.hashes[start : start + self._config.slice_blocks]
        sliced = residency.lease(
            part,
            after=event.hashes[start - 1] if start else None,
            mapped_from=max(0, event.skip_count - start),
            usable=self._shares.usable(event.session, event.namespace),
            limit_count=self._shares.lease_count_max(residency),
            now=now,
        )
        lease.places.append(sliced.places)
        done_count = start + len(sliced.places)
        if sliced.cut is Cut.NONE and done_count < len(event.hashes):
            return [ins.Continue(replace(event, lease=lease.lease, done_count=done_count))]
        return [self._grant(lease, residency, event, sliced.cut)]

    def _begin_lease(self, event: ev.Acquire, residency: Residency, now: float) -> Lease | None:
        """A lease on nothing yet; None while draining."""
        engine = None
        if event.session != DAEMON_SESSION:
            session = self._engines.require_slots(event.session, event.namespace)
            engine = session.engine
            if self._leases.count_of(event.session) >= self._config.leases_per_session_max:
                raise LimitExceeded(
                    f"{self._config.leases_per_session_max} leases are open in this session: "
                    "release some"
                )
            if event.deadline > now + self._config.lease_seconds_max:
                raise BadRequest(
                    f"a lease may last {self._config.lease_seconds_max:g} s: ask for less"
                )
        self._shares.note_use(event.namespace, now)
        if self._draining:
            return None
        return self._leases.grant(
            session=event.session,
            engine=engine,
            namespace=event.namespace,
            void_count=residency.void_count,
            deadline=event.deadline,
        )

    def _grant(
        self, lease: Lease, residency: Residency, event: ev.Acquire, cut: Cut
    ) -> ins.LeaseGranted:
        places = lease.all_places()
        count = len(places)
        if count <= event.skip_count:
            self._end_lease(lease.lease)
            return self._no_lease(residency, event, cut)
        lease.places = [places]
        return ins.LeaseGranted(
            lease=lease.lease,
            leased_count=count,
            slots=residency.tier.slots_of(places[event.skip_count :]),
            deadline=event.deadline,
            cut=cut,
            epoch=residency.epoch,
            tiers=((TierName.DRAM, count),),
        )

    def _no_lease(self, residency: Residency, event: ev.Acquire, cut: Cut) -> ins.LeaseGranted:
        none = np.zeros(0, dtype=np.uint32)
        return ins.LeaseGranted(None, 0, none, event.deadline, cut, residency.epoch, ())

    def _on_release(self, event: ev.Release, now: float) -> list[ins.Instruction]:
        count = 0
        engine = None
        if event.session != DAEMON_SESSION:
            engine = self._engines.require_live(event.session).engine
        for lease in event.leases:
            found = self._leases.get(lease)
            if found is not None and found.engine == engine:
                count += 1
                self._end_lease(lease)
        return [ins.LeasesEnded(count)]

    def _end_lease(self, lease: LeaseId) -> None:
        ended = self._leases.end(lease)
        if ended is not None:
            self._unpin(ended)

    def _unpin(self, lease: Lease) -> None:
        self._namespaces[lease.namespace].tier.unpin_lease(lease.all_places())

    # --------------------------------------------------------------------- commit, abort, evict

    def _on_commit(self, event: ev.Commit, now: float) -> list[ins.Instruction]:
        residency = self._residency(event.namespace)
        if len(event.hashes) != len(event.slots):
            raise BadRequest(f"{len(event.hashes)} hashes for {len(event.slots)} slots")
        start, stop = event.done_count, event.done_count + self._config.slice_blocks
        # In each slice again: since the last one the session may have ended or aborted its slots.
        self._require_reserved(event.session, residency, event.slots[start:])
        self._shares.note_use(event.namespace, now)
        done = residency.commit(
            event.hashes[start:stop],
            residency.tier.allocator.places_of(event.slots[start:stop]),
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
        namespace, sequence = event.namespace, self._sequence
        slots = residency.tier.slots_of(done.ready)
        self._sequence += len(slots)
        found: list[ins.Instruction] = [
            ins.WriteReady(namespace, slots, done.hashes, done.parents, residency.epoch, sequence)
        ]
        found.extend(
            ins.BlocksStored(namespace, TierName.DRAM, hashes, parent)
            for hashes, parent in done.runs()
        )
        if event.checksums is None:
            residency.tier.pin_for_transfer(done.ready)
            found.append(ins.ComputeChecksums(namespace, slots))
        else:
            part = event.checksums[event.done_count :]
            found.append(ins.WriteChecksums(namespace, slots, part[done.ready_positions]))
        return found

    def _on_abort(self, event: ev.Abort, now: float) -> list[ins.Instruction]:
        residency = self._residency(event.namespace)
        self._require_reserved(event.session, residency, event.slots)
        residency.tier.abort(residency.tier.allocator.places_of(event.slots))
        return [
            ins.WriteGone(event.namespace, event.slots),
            ins.Aborted(len(event.slots)),
        ]

    def _require_reserved(self, session: SessionId, residency: Residency, slots: ev.Slots) -> None:
        if session != DAEMON_SESSION:
            self._engines.require_live(session)
        allocator = residency.tier.allocator
        places = allocator.places_of(slots)
        # Not by sorting: a long list takes 30 times as long.
        named = np.zeros(allocator.place_count, dtype=np.bool_)
        named[places] = True
        if np.count_nonzero(named) != len(slots):
            raise NotReserved("a slot is named twice: name each reserved slot once")
        foreign = np.flatnonzero(residency.tier.owner[places] != session)
        if len(foreign):
            raise NotReserved(
                f"slot {int(slots[foreign[0]])} is not reserved by this session (any more): "
                "commit or abort each reserved slot once"
            )

    def _on_evict(self, event: ev.Evict, now: float) -> list[ins.Instruction]:
        residency = self._residency(event.namespace)
        resident_count = residency.index.match(event.hashes)
        if event.left_count is not None:  # What is committed again meanwhile is left alone.
            resident_count = min(resident_count, event.left_count)
        start = max(0, resident_count - self._config.evict_slice_blocks)
        part = event.hashes[start:resident_count]
        evicted = residency.evict_prefix(part)
        evicted_count = event.evicted_count + len(evicted)
        found = _removed(event.namespace, evicted)
        if part and len(evicted) == len(part) and start:
            rest = replace(event, left_count=start, evicted_count=evicted_count)
            return [*found, ins.Continue(rest)]
        kept_count = resident_count - len(evicted)
        return [*found, ins.Evicted(evicted_count, kept_count)]

    def _on_hint_session_end(self, event: ev.HintSessionEnd, now: float) -> list[ins.Instruction]:
        residency = self._residency(event.namespace)
        stop = event.done_count + self._config.slice_blocks
        is_used = residency.end_user_session(event.hashes[event.done_count : stop])
        if is_used and stop < len(event.hashes):
            return [ins.Continue(replace(event, done_count=stop))]
        return [ins.HintUsed(is_used)]

    # ------------------------------------------------------------------------- from the shell

    def _on_checksums_computed(
        self, event: ev.ChecksumsComputed, now: float
    ) -> list[ins.Instruction]:
        tier = self._residency(event.namespace).tier
        places = tier.allocator.places_of(event.slots)
        ready = tier.state[places] == ReplicaState.READY
        tier.unpin_transfer(places)
        slots = event.slots[ready]
        if not len(slots):
            return []
        return [ins.WriteChecksums(event.namespace, slots, event.checksums[ready])]

    def _on_slots_corrupt(self, event: ev.SlotsCorrupt, now: float) -> list[ins.Instruction]:
        residency = self._residency(event.namespace)
        places = residency.tier.allocator.places_of(event.slots)
        hashes = residency.void_places(places)
        return [
            ins.WriteGone(event.namespace, event.slots),
            *_removed(event.namespace, hashes),
            ins.Continue(ev.SweepVoid()),
        ]

    def _on_sweep_void(self, event: ev.SweepVoid, now: float) -> list[ins.Instruction]:
        found = self._shares.empty_withdrawn()
        if found is not None:
            return [*found, ins.Continue(event)]
        for residency in self._namespaces.values():
            if residency.sweep_pending:
                hashes = residency.sweep(self._config.slice_blocks)
                return [
                    *_removed(residency.facts.namespace, hashes),
                    ins.Continue(event),
                ]
        return self._shares.drop_idle_sets()

    def _on_tick(self, event: ev.Tick, now: float) -> list[ins.Instruction]:
        for lease in self._leases.expire(now=now):
            self._unpin(lease)
        self._finish_quarantines(now)
        return [
            *_quiet_requests(self._engines.ask_again()),
            *self._shares.keep_watermarks(),
            *self._shares.drop_idle_sets(),
        ]

    def _on_drain_started(self, event: ev.DrainStarted, now: float) -> list[ins.Instruction]:
        self._draining = True
        return []

    def _on_drain_ended(self, event: ev.DrainEnded, now: float) -> list[ins.Instruction]:
        self._draining = False
        return []

    # --------------------------------------------------------------------------------- helpers

    def _residency(self, namespace: NamespaceId) -> Residency:
        found = self._namespaces.get(namespace)
        if found is None:
            raise UnknownNamespace(f"namespace {namespace} is not open: open it again")
        return found


def _quiet_requests(asked: list[QuietAsked]) -> list[ins.Instruction]:
    return [ins.RequestQuiet(one.session, one.about) for one in asked]


__all__ = ["BlockManager", "ManagerConfig"]


def _removed(namespace: NamespaceId, hashes: list[BlockHash]) -> list[ins.Instruction]:
    return [ins.BlocksRemoved(namespace, TierName.DRAM, hashes)] if hashes else []
