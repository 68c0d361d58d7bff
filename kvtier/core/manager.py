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
from kvtier.core.adoption import Adoption
from kvtier.core.audit import find_violations, gather_stats, lower_counts
from kvtier.core.committing import Committing
from kvtier.core.engines import DAEMON_SESSION, EngineTable, QuietAsked, Session
from kvtier.core.erasing import Erasing
from kvtier.core.granting import Granting
from kvtier.core.ladder import Ladder
from kvtier.core.learning import Learning
from kvtier.core.listing import Listing, list_rows
from kvtier.core.locating import Locator
from kvtier.core.namespace_facts import NamespaceFacts
from kvtier.core.promotions import Promotions
from kvtier.core.residency import Residency
from kvtier.core.settings import ManagerConfig
from kvtier.core.shares import Shares
from kvtier.core.slabs import SlabLedger
from kvtier.core.slices import Lost
from kvtier.core.stats import ManagerStats
from kvtier.errors import BadRequest, Draining, UnknownNamespace
from kvtier.policy.eviction import PolicyMaker
from kvtier.types import (
    BlockHash,
    NamespaceId,
    PackedHashes,
    PrefixMatch,
    RemovedFor,
    SessionId,
    TierName,
)


class BlockManager:
    """See the module. Requests that cannot be served raise a KVTierError and change nothing."""

    def __init__(self, config: ManagerConfig, *, make_policy: PolicyMaker) -> None:
        self._config = config
        self._make_policy = make_policy
        self._namespaces: dict[NamespaceId, Residency] = {}
        self._engines = EngineTable(grace_seconds=config.grace_seconds)
        self._ledger = SlabLedger(
            slab_bytes=config.slab_bytes, slab_count_max=config.slab_count_max
        )
        self._shares = Shares(self._ledger, self._namespaces, self._engines, config)
        self._ladder = Ladder(self._namespaces, config.lower, self._shares.tenancy)
        self._promotions = Promotions(self._namespaces, self._ladder, self._shares)
        self._granting = Granting(
            self._namespaces, self._engines, self._shares, self._promotions, self._ladder, config
        )
        self.lease_namespace = self._granting.namespace_of
        self._committing = Committing(
            self._namespaces, self._engines, self._shares, self._ladder, config
        )
        self._adoption = Adoption(self._namespaces, self._ledger, self._shares, self._engines)
        self._learning = Learning(self._namespaces)
        self._erasing = Erasing(self._namespaces, self._ladder)
        self.locator = Locator(self._namespaces)
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
            **self._granting.handlers(),
            ev.Reserve: self._on_reserve,
            ev.Commit: self._known(self._committing.commit),
            ev.Abort: self._known(self._committing.abort),
            ev.Evict: self._on_evict,
            ev.HintSessionEnd: self._on_hint_session_end,
            ev.HintPaused: self._on_hint_paused,
            ev.Prefetch: self._known(self._promotions.on_prefetch),
            ev.ChecksumsComputed: self._on_checksums_computed,
            ev.SlotsCorrupt: self._on_slots_corrupt,
            ev.WithdrawSlabSet: self._shares.on_withdraw_slab_set,
            ev.LowerOpened: self._on_lower_opened,
            ev.BlocksRecovered: self._on_blocks_recovered,
            ev.BlocksFound: self._on_blocks_found,
            ev.LowerChanged: self._on_lower_changed,
            ev.Demoted: self._on_demoted,
            ev.Promoted: self._on_promoted,
            ev.Tick: self._on_tick,
            ev.DrainStarted: self._on_drain_started,
            ev.DrainEnded: self._on_drain_ended,
            ev.SweepVoid: self._on_sweep_void,
            **(self._adoption.handlers() | self._learning.handlers() | self._erasing.handlers()),
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
        hashes = PackedHashes(packed, hash_bytes)
        if not residency.facts.chained:
            return residency.presence(hashes)
        count = residency.index.match(hashes)
        opened = self._ladder.opened()
        memory_count = residency.memory_count(hashes, count) if opened else count
        counts = {TierName.DRAM: memory_count}
        if len(opened) == 1:
            counts[opened[0].lower.tier] = count - memory_count
        elif memory_count < count:
            rows = residency.index.rows(hashes[memory_count:count])
            absent = np.ones(len(rows), dtype=np.bool_)
            origins = self._ladder.origins(residency.index, rows, absent)
            numbers = np.bincount(origins, minlength=len(self._ladder.tiers) + 1).tolist()
            counts.update(zip(self._ladder.tiers, numbers[1:], strict=True))
        tiers = tuple((tier, number) for tier, number in counts.items() if number)
        return PrefixMatch(count, memory_count, tiers)

    def listing(self, namespace: NamespaceId, row_first: int) -> Listing:
        """The resident blocks in a page of rows."""
        return list_rows(self._residency(namespace), row_first)

    def namespace_epoch(self, namespace: NamespaceId) -> int:
        return self._residency(namespace).epoch

    def next_deadline(self) -> float | None:
        """When a Tick will have something to do by time alone; None when nothing waits."""
        times = [
            self._granting.next_deadline(),
            self._engines.next_ready(),
            self._adoption.next_deadline(),
        ]
        return min((time for time in times if time is not None), default=None)

    def stats(self) -> ManagerStats:
        return gather_stats(
            self._namespaces,
            self._engines,
            self._granting.leases,
            self._ledger,
            lower={
                rung.lower.tier: lower_counts(rung.lower, rung.demotions, self._promotions)
                for rung in self._ladder.opened()
            },
            draining=self._granting.is_draining,
        )

    def sessions(self) -> list[Session]:
        """Of everyone who may still touch memory, for a daemon that adopts it after this one."""
        return self._engines.sessions()

    def recency(self, tier: TierName) -> ev.Slots:
        """Slots of all blocks in a tier below memory, least recently used first, for an orderly
        close."""
        return self._ladder.rungs[tier].lower.recency()

    def check_invariants(self) -> list[str]:
        """What is wrong, one line each; empty when all is well. Called after every test step."""
        return [
            *find_violations(self._namespaces, self._engines, self._granting.leases, self._ledger),
            *self._ladder.check_invariants(),
            *self._promotions.check_invariants(),
            *self._adoption.check_invariants(),
            *self._granting.check_invariants(),
        ]

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
        residency = Residency(
            NamespaceFacts(
                event.namespace,
                event.hash_bytes,
                event.slot_bytes,
                event.shard_count,
                event.shard_bytes,
                event.fingerprint,
                chained=event.chained,
                block_tokens=event.block_tokens,
                tenant=event.tenant,
                block_count_max=self._ledger.slab_count_max // event.shard_count * set_slot_count,
                key_salt=self._config.key_salt,
            ),
            epoch=event.epoch,
            set_slot_count=set_slot_count,
            make_policy=self._make_policy,
            lower=self._ladder.tiers,
        )
        self._namespaces[event.namespace] = residency
        if event.fingerprint:
            self._ladder.note_namespace(residency)
        self._shares.note_use(event.namespace, now)
        return []

    def _on_clear(self, event: ev.Clear, now: float) -> list[ins.Instruction]:
        residency = self._residency(event.namespace)
        assert event.epoch != residency.epoch, "an epoch was used twice"
        self._ladder.clear(residency.facts.fingerprint)
        voided_count = residency.clear(event.epoch)
        return [
            ins.NamespaceCleared(event.namespace, event.epoch, voided_count),
            ins.Cleared(event.namespace, event.epoch, voided_count),
            ins.Continue(ev.SweepVoid()),
        ]

    def _on_session_opened(self, event: ev.SessionOpened, now: float) -> list[ins.Instruction]:
        self._engines.open(event)
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
            *self._shares.drop_idle_sets(now),
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
            self._granting.end_engine(engine)
        self._finish_quarantines(now)
        return [*_quiet_requests(asked), *self._shares.drop_idle_sets(now)]

    def _finish_quarantines(self, now: float) -> None:
        for session in self._engines.take_finished(now):
            for residency in self._namespaces.values():
                tier = residency.tier
                if session not in tier.reserved_by:
                    continue
                places = tier.places_reserved_by(session)
                heir = self._adoption.heir(session)
                if heir is None:
                    tier.abort(places)
                else:
                    tier.hand_over(places, heir)
            self._ledger.unmap_session(session)  # Its process is quiet about it, or dead.
            self._engines.forget(session)

    # ---------------------------------------------------------------------------------- leases

    def _on_reserve(self, event: ev.Reserve, now: float) -> list[ins.Instruction]:
        residency = self._residency(event.namespace)
        if self._granting.is_draining:
            raise Draining("the daemon is shutting down: no new offloads")
        if event.count < 1:
            raise BadRequest(f"reserve {event.count} slots: ask for at least one")
        engine = None
        if event.session != DAEMON_SESSION:
            engine = self._engines.require_slots(event.session, event.namespace).engine
        self._shares.note_use(event.namespace, now)
        return self._shares.reserve(event, residency, engine, now)

    def _on_acquire(self, event: ev.Acquire, now: float) -> list[ins.Instruction]:
        return self._granting.acquire(event, self._residency(event.namespace), now)

    # --------------------------------------------------------------------- commit, abort, evict

    def _on_evict(self, event: ev.Evict, now: float) -> list[ins.Instruction]:
        residency = self._residency(event.namespace)
        resident_count = residency.index.match(event.hashes)
        if event.left_count is not None:  # What is committed again meanwhile is left alone.
            resident_count = min(resident_count, event.left_count)
        start = max(0, resident_count - self._config.evict_slice_blocks)
        part = event.hashes[start:resident_count]
        count, lost = residency.evict_prefix(part)
        evicted_count = event.evicted_count + count
        found = self._forget(residency, lost, RemovedFor.EVICT)
        if part and count == len(part) and start:
            rest = replace(event, left_count=start, evicted_count=evicted_count)
            return [*found, ins.Continue(rest)]
        kept_count = resident_count - count
        return [*found, ins.Evicted(evicted_count, kept_count)]

    def _on_hint_session_end(self, event: ev.HintSessionEnd, now: float) -> list[ins.Instruction]:
        residency = self._residency(event.namespace)
        stop = event.done_count + self._config.slice_blocks
        is_used = residency.end_user_session(event.hashes[event.done_count : stop])
        if is_used and stop < len(event.hashes):
            return [ins.Continue(replace(event, done_count=stop))]
        return [ins.HintUsed(is_used)]

    def _on_hint_paused(self, event: ev.HintPaused, now: float) -> list[ins.Instruction]:
        residency = self._residency(event.namespace)
        if not self._ladder.is_writable:
            return [ins.HintUsed(False)]
        stop = event.done_count + self._config.slice_blocks
        self._ladder.admit(residency, residency.index.rows(event.hashes[event.done_count : stop]))
        if stop < len(event.hashes):
            return [ins.Continue(replace(event, done_count=stop))]
        return self._move(now, ins.HintUsed(True))

    # ------------------------------------------------------------------------- from the shell

    def _on_checksums_computed(
        self, event: ev.ChecksumsComputed, now: float
    ) -> list[ins.Instruction]:
        return [*self._committing.checksums_computed(event, now), *self._move(now)]

    def _on_slots_corrupt(self, event: ev.SlotsCorrupt, now: float) -> list[ins.Instruction]:
        residency = self._residency(event.namespace)
        places = residency.tier.allocator.places_of(event.slots)
        lost = self._ladder.lose_uncompared(residency, event.slots)
        hashes = residency.void_places(places)
        return [
            *lost,
            ins.WriteGone(event.namespace, event.slots),
            *_removed(event.namespace, TierName.DRAM, hashes, RemovedFor.CORRUPT),
            ins.Continue(ev.SweepVoid()),
        ]

    def _on_sweep_void(self, event: ev.SweepVoid, now: float) -> list[ins.Instruction]:
        if self._adoption.is_due(now):
            self._adoption.expire_one(now)
            return [ins.Continue(event)]
        found = self._shares.empty_withdrawn()
        if found is not None:
            return [*found, ins.Continue(event)]
        for residency in self._namespaces.values():
            if residency.sweep_pending:
                lost = residency.sweep(self._config.swept_slice_blocks)
                gone = self._forget(residency, lost, RemovedFor.PARENT)
                return [*gone, ins.Continue(event)]
        found = self._ladder.forget_some(now)
        if found is not None:
            return [*found, ins.Continue(event)]
        return [*self._shares.drop_idle_sets(now), *self._move(now)]

    def _on_tick(self, event: ev.Tick, now: float) -> list[ins.Instruction]:
        waits = self._granting.end_waits(now)
        self._granting.expire(now)
        self._finish_quarantines(now)
        return [
            *waits,
            *_quiet_requests(self._engines.ask_again()),
            *self._shares.keep_watermarks(),
            *self._learning.begin(),
            *self._shares.drop_idle_sets(now),
            *self._move(now),
        ]

    def _on_drain_started(self, event: ev.DrainStarted, now: float) -> list[ins.Instruction]:
        self._granting.is_draining = True
        return []

    def _on_drain_ended(self, event: ev.DrainEnded, now: float) -> list[ins.Instruction]:
        self._granting.is_draining = False
        return []

    # ------------------------------------------------------------------------- tiers below memory

    def _on_lower_opened(self, event: ev.LowerOpened, now: float) -> list[ins.Instruction]:
        rung = self._ladder.rungs[event.tier]
        found = rung.lower.on_opened(event, now)
        rung.demotions.note_opened()
        return found

    def _on_blocks_recovered(self, event: ev.BlocksRecovered, now: float) -> list[ins.Instruction]:
        return self._ladder.rungs[event.tier].lower.on_blocks_recovered(event, now)

    def _on_blocks_found(self, event: ev.BlocksFound, now: float) -> list[ins.Instruction]:
        rung = self._ladder.rungs[event.tier]
        found, is_short = rung.lower.on_blocks_found(event)
        if is_short:
            rung.demotions.make_room(self._residency(event.namespace).facts.tenant, now)
        return [*found, *self._move(now)]

    def _on_lower_changed(self, event: ev.LowerChanged, now: float) -> list[ins.Instruction]:
        return self._ladder.rungs[event.tier].lower.on_changed(event, now)

    def _on_demoted(self, event: ev.Demoted, now: float) -> list[ins.Instruction]:
        return [*self._ladder.on_demoted(event, now), *self._move(now)]

    def _on_promoted(self, event: ev.Promoted, now: float) -> list[ins.Instruction]:
        return [*self._promotions.on_promoted(event, now), *self._move(now)]

    def _move(self, now: float, *replies: ins.Reply) -> list[ins.Instruction]:
        """Begin what may begin, grant what has come; the sweep goes on with what became void."""
        found: list[ins.Instruction] = [
            *self._ladder.pump(now),
            *self._promotions.pump(now),
            *self._granting.grant_ended(),
            *replies,
        ]
        return [*found, ins.Continue(ev.SweepVoid())] if self._sweep_is_due(now) else found

    def _sweep_is_due(self, now: float) -> bool:
        return (
            self._adoption.is_due(now)
            or self._shares.empties_sets
            or self._ladder.forgets_something(now)
            or any(residency.sweep_pending for residency in self._namespaces.values())
        )

    # --------------------------------------------------------------------------------- helpers

    def _forget(
        self, residency: Residency, lost: Lost, reason: RemovedFor
    ) -> list[ins.Instruction]:
        namespace = residency.facts.namespace
        return [
            *self._ladder.forget(lost),
            *_removed(namespace, TierName.DRAM, lost.from_memory, reason),
            *(
                one
                for tier, hashes in lost.from_lower.items()
                for one in _removed(namespace, tier, hashes, reason)
            ),
        ]

    def _known(
        self, handler: Callable[[Any, float], list[ins.Instruction]]
    ) -> Callable[[Any, float], list[ins.Instruction]]:
        """A handler of requests whose namespace may not be open."""

        def handle(event: Any, now: float) -> list[ins.Instruction]:
            self._residency(event.namespace)
            return handler(event, now)

        return handle

    def _residency(self, namespace: NamespaceId) -> Residency:
        found = self._namespaces.get(namespace)
        if found is None:
            raise UnknownNamespace(f"namespace {namespace} is not open: open it again")
        return found


def _quiet_requests(asked: list[QuietAsked]) -> list[ins.Instruction]:
    return [ins.RequestQuiet(one.session, one.about) for one in asked]


__all__ = ["BlockManager", "ManagerConfig"]


def _removed(
    namespace: NamespaceId, tier: TierName, hashes: list[BlockHash], reason: RemovedFor
) -> list[ins.Instruction]:
    return [ins.BlocksRemoved(namespace, tier, hashes, reason)] if hashes else []
