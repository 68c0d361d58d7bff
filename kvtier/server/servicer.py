"""The calls of engines: match, leases, reservations; and the greeting of by-value clients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import DAEMON_SESSION
from kvtier.errors import BadRequest
from kvtier.server.base import Base
from kvtier.server.call_notes import CallNotes
from kvtier.server.calls import Handlers, Send
from kvtier.server.leasing import Leasing
from kvtier.server.namespaces import OpenedNamespace
from kvtier.server.remote_search import RemoteSearch
from kvtier.server.security import Caller, Peer, Rights
from kvtier.server.sessions import Sessions
from kvtier.server.turn_kinds import TurnKinds
from kvtier.server.watch import TokenIds, WatchHub
from kvtier.server.wire import (
    check_packed,
    check_protocol,
    slots_from,
    tier_counts,
)
from kvtier.types import (
    PROTOCOL_VERSION,
    BlockHash,
    Cut,
    LeaseId,
    NamespaceId,
    PackedHashes,
    SessionId,
    TierName,
)
from kvtier.v1 import kvtier_pb2 as pb
from kvtier.version import VERSION

RESERVE_SLOTS_MAX = 65_536  # The answer stays far below 4 MiB. Abort takes as many.
RELEASE_LEASES_MAX = 4096  # More, unknown ones included, would hold the loop up.
WORTH_SECONDS_MAX = 86_400.0
TURN_KIND_CHARS_MAX = 32


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change in the daemon's life."""

    generation: int
    wait_seconds_max: float


class EngineCalls:
    """Each method is one RPC; who may call it was checked before (calls.py)."""

    def __init__(
        self,
        base: Base,
        sessions: Sessions,
        watch: WatchHub,
        leasing: Leasing,
        facts: EngineFacts,
        search: RemoteSearch | None = None,
    ) -> None:
        self._core = base.core
        self._namespaces = base.namespaces
        self._sessions = sessions
        self._watch = watch
        self._leasing = leasing
        self._clock = base.clock
        self._metrics = base.metrics
        self._history = base.history
        self._notes = CallNotes(base)
        self._facts = facts
        self._search = search
        self._missed = base.missed
        self._turn_kinds = TurnKinds()

    def add_to(self, handlers: Handlers) -> None:
        handlers.unary |= {
            "Greet": self.greet,
            "Match": self.match,
            "Release": self.release,
            "Reserve": self.reserve,
            "Commit": self.commit,
            "Abort": self.abort,
            "Prefetch": self.prefetch,
            "Hint": self.hint,
        }
        handlers.streaming["Acquire"] = self.acquire

    async def greet(self, request: pb.GreetRequest, peer: Peer) -> pb.GreetResponse:
        check_protocol(request.protocol)
        self._sessions.require_room(peer.tenant)
        opened: OpenedNamespace | None = None
        if request.HasField("spec"):
            opened = await self._namespaces.open_for(request.spec, peer)
        caller = self._sessions.greet(peer)
        if opened is not None:
            self._core.post(ev.NamespaceJoined(caller.session, opened.id))
        return pb.GreetResponse(
            protocol=PROTOCOL_VERSION,
            daemon_version=VERSION,
            token=caller.token,
            generation=self._facts.generation,
            namespace_id=opened.id if opened else 0,
            fingerprint=opened.fingerprint if opened else b"",
            epoch=self._core.namespace_epoch(opened.id) if opened else 0,
        )

    async def match(self, request: pb.MatchRequest, caller: Caller) -> pb.MatchResponse:
        """The hot path: no copy of the hashes, no event."""
        started_ns = self._clock.now_ns()
        packed = request.hashes
        namespace = self._namespaces.get_for(request.namespace_id, caller.tenant)
        count = check_packed(packed, namespace.spec.hash_bytes)
        found = self._core.match_packed(namespace.id, packed)
        reason = ""
        if found.matched_count < count:
            hashes = PackedHashes(packed, namespace.spec.hash_bytes)
            reason = self._missed.of_match(namespace.id, hashes, found)
            if self._search is not None and namespace.spec.chained:
                self._search.begin(namespace.id, hashes, found.matched_count)
        self._metrics.blocks.asked.note(namespace.id, "match", count, found.tiers, reason)
        spent_ns = self._clock.now_ns() - started_ns
        seconds = spent_ns / 1e9
        self._notes.matched(request, caller, namespace, packed, found, seconds=seconds)
        return pb.MatchResponse(
            matched_count=found.matched_count,
            memory_count=found.memory_count,
            tiers=tier_counts(found.tiers),
            epoch=self._core.namespace_epoch(namespace.id),
            daemon_us=spent_ns // 1000,
            presence=found.presence,
        )

    # ---------------------------------------------------------------------------------- leases

    async def acquire(self, request: pb.AcquireRequest, caller: Caller, send: Send) -> None:
        """One `ready`, before it a `pending` if blocks must be promoted. Cancelled before `ready`
        is sent, the lease ends."""
        namespace, hashes = self._hashes_of(request, caller)
        if request.skip_count > len(hashes):
            raise BadRequest(f"skip_count is {request.skip_count} of {len(hashes)} hashes")
        deadline, now = request.deadline_ns / 1e9, self._clock.now()
        granted, waited = None, "no"

        async def tell_pending(reply: ins.LeasePending) -> None:
            nonlocal waited
            waited = "yes"
            await _send_pending(send, reply)

        if deadline > now:
            event = ev.Acquire(
                session=caller.session,
                namespace=namespace.id,
                hashes=hashes,
                deadline=deadline,
                skip_count=request.skip_count,
                wait_until=self._wait_until(request.wait_ms, now, deadline),
                takes_direct=self._takes_direct(caller.session),
            )
            if namespace.spec.chained:  # What lies elsewhere is found as chains.
                await self._look(event)
            granted = await self._leasing.acquire(event, tell_pending)
        seconds = self._clock.now() - now
        self._metrics.calls.acquire_seconds[waited].observe(seconds)
        self._notes.acquired(request, caller, hashes, granted, seconds=seconds)
        if granted is None:
            self._note_acquire(namespace.id, hashes, Cut.DEADLINE, 0, ())
            await send(self._late(namespace, request))
            return
        self._note_acquire(namespace.id, hashes, granted.cut, granted.leased_count, granted.tiers)
        if granted.is_direct is not None:
            self._metrics.cxl.direct_blocks.inc(int(granted.is_direct.sum()))
        ready = pb.AcquireReady(
            lease_id=granted.lease or 0,
            leased_count=granted.leased_count,
            slots=granted.slots.tolist(),
            deadline_ns=request.deadline_ns,
            cut=cast("pb.Cut", int(granted.cut)),
            epoch=granted.epoch,
            tiers=tier_counts(granted.tiers),
            slot_tiers=_slot_tiers(granted),
        )
        try:
            await send(pb.AcquireResponse(ready=ready))
        except BaseException:
            self._leasing.release(caller.session, granted)
            raise

    async def release(self, request: pb.ReleaseRequest, caller: Caller) -> pb.ReleaseResponse:
        """Leases of the caller's engine, and pins of administrators, which the daemon holds."""
        _check_count("lease_ids", len(request.lease_ids), RELEASE_LEASES_MAX)
        seconds = request.prefill_seconds, request.onboard_seconds
        if not all(0 <= one <= WORTH_SECONDS_MAX for one in seconds):
            raise BadRequest(f"prefill_seconds and onboard_seconds are {seconds}")
        leases = tuple(LeaseId(lease) for lease in request.lease_ids)
        ended = await self._core.run(ev.Release(caller.session, leases))
        assert isinstance(ended, ins.LeasesEnded), "Release has one kind of reply"
        count = ended.count
        if count and seconds[0]:
            self._metrics.blocks.note_release(*seconds)
        pinned = self._pins_of(caller, leases) if count < len(leases) else ()
        if pinned:
            pins = await self._core.run(ev.Release(DAEMON_SESSION, pinned))
            assert isinstance(pins, ins.LeasesEnded), "Release has one kind of reply"
            count += pins.count
        return pb.ReleaseResponse(ended_count=count)

    # ----------------------------------------------------------------------------- reservations

    async def reserve(self, request: pb.ReserveRequest, caller: Caller) -> pb.ReserveResponse:
        namespace = self._namespaces.get_for(request.namespace_id, caller.tenant)
        _check_count("count", request.count, RESERVE_SLOTS_MAX)
        reply = await self._core.run(ev.Reserve(caller.session, namespace.id, request.count))
        assert isinstance(reply, ins.SlotsReserved), "Reserve has one kind of reply"
        self._metrics.blocks.reserved_slots.inc(len(reply.slots))
        return pb.ReserveResponse(
            slots=reply.slots.tolist(), epoch=reply.epoch, stock_count_max=reply.stock_count_max
        )

    async def commit(self, request: pb.CommitRequest, caller: Caller) -> pb.CommitResponse:
        namespace, hashes = self._hashes_of(request, caller)
        event = _commit_event(request, caller.session, namespace, hashes)
        with self._watch.describing(self._token_ids(request, namespace, hashes)):
            reply = await self._core.run(event)
        assert isinstance(reply, ins.Committed), "Commit has one kind of reply"
        self._metrics.blocks.note_outcomes(reply.outcomes)
        if any(reply.outcomes):
            self._history.note_refused(namespace.id, hashes, reply.outcomes, self._clock.now())
        return pb.CommitResponse(outcomes=reply.outcomes, epoch=reply.epoch)

    async def abort(self, request: pb.AbortRequest, caller: Caller) -> pb.AbortResponse:
        namespace = self._namespaces.get_for(request.namespace_id, caller.tenant)
        _check_count("slots", len(request.slots), RESERVE_SLOTS_MAX)
        slots = slots_from(request.slots)
        reply = await self._core.run(ev.Abort(caller.session, namespace.id, slots))
        assert isinstance(reply, ins.Aborted), "Abort has one kind of reply"
        self._metrics.blocks.aborted_slots.inc(reply.count)
        return pb.AbortResponse(freed_count=reply.count)

    # ---------------------------------------------------------------------------------- advice

    async def prefetch(self, request: pb.PrefetchRequest, caller: Caller) -> pb.PrefetchResponse:
        namespace, hashes = self._hashes_of(request, caller)
        reply = await self._core.run(ev.Prefetch(namespace.id, hashes))
        assert isinstance(reply, ins.PrefetchBegun), "Prefetch has one kind of reply"
        if self._search is not None and namespace.spec.chained:
            count = self._core.match_packed(namespace.id, hashes.packed).matched_count
            self._search.begin(namespace.id, hashes, count)
        return pb.PrefetchResponse(
            memory_count=reply.memory_count, promoting_count=reply.promoting_count
        )

    async def hint(self, request: pb.HintRequest, caller: Caller) -> pb.HintResponse:
        namespace, hashes = self._hashes_of(request, caller)
        if len(request.turn_kind) > TURN_KIND_CHARS_MAX:
            raise BadRequest(f"turn_kind is too long: at most {TURN_KIND_CHARS_MAX} characters")
        event: ev.HintSessionEnd | ev.HintPaused | ev.HintTurnKind
        if request.session_end:
            event = ev.HintSessionEnd(namespace.id, hashes)
        elif request.paused_ms:
            event = ev.HintPaused(namespace.id, hashes)
        elif request.turn_kind:
            number = self._turn_kinds.number(namespace.id, request.turn_kind)
            event = ev.HintTurnKind(namespace.id, hashes, number)
        else:
            return pb.HintResponse(used=False)
        reply = await self._core.run(event)
        assert isinstance(reply, ins.HintUsed), "hints have one kind of reply"
        return pb.HintResponse(used=reply.used)

    # --------------------------------------------------------------------------------- helpers

    def _hashes_of(
        self,
        request: pb.AcquireRequest | pb.CommitRequest | pb.PrefetchRequest | pb.HintRequest,
        caller: Caller,
    ) -> tuple[OpenedNamespace, PackedHashes]:
        namespace = self._namespaces.get_for(request.namespace_id, caller.tenant)
        packed = request.hashes
        check_packed(packed, namespace.spec.hash_bytes)
        return namespace, PackedHashes(packed, namespace.spec.hash_bytes)

    def _pins_of(self, caller: Caller, leases: tuple[LeaseId, ...]) -> tuple[LeaseId, ...]:
        """Of these leases those in the caller's namespaces, if it may end pins."""
        if caller.peer.rights < Rights.ADMIN:
            return ()
        mine = {one.id for one in self._namespaces.seen_by(caller.tenant)}
        return tuple(lease for lease in leases if self._core.lease_namespace(lease) in mine)

    def _takes_direct(self, session: SessionId) -> bool:
        record = self._sessions.get(session)
        return record is not None and record.knows_segments

    async def _look(self, event: ev.Acquire) -> None:
        """Who waits for lower tiers waits for what other nodes have, too."""
        if self._search is None or not event.wait_until:
            return
        assert isinstance(event.hashes, PackedHashes)
        count = self._core.match_packed(event.namespace, event.hashes.packed).matched_count
        await self._search.wait(event.namespace, event.hashes, count, event.wait_until)

    def _note_acquire(
        self,
        namespace: NamespaceId,
        hashes: PackedHashes,
        cut: Cut,
        leased_count: int,
        tiers: Iterable[tuple[TierName, int]],
    ) -> None:
        reason = self._missed.of_lease(namespace, hashes, leased_count, cut)
        self._metrics.blocks.asked.note(namespace, "acquire", len(hashes), tiers, reason)
        self._metrics.blocks.acquire_cuts.labels(cut.name.lower()).inc()

    def _late(self, namespace: OpenedNamespace, request: pb.AcquireRequest) -> pb.AcquireResponse:
        ready = pb.AcquireReady(
            deadline_ns=request.deadline_ns,
            cut=cast("pb.Cut", int(Cut.DEADLINE)),
            epoch=self._core.namespace_epoch(namespace.id),
        )
        return pb.AcquireResponse(ready=ready)

    def _wait_until(self, wait_ms: int, now: float, deadline: float) -> float:
        """0 for who takes what is in memory now."""
        if not wait_ms:
            return 0.0
        return min(now + min(wait_ms / 1e3, self._facts.wait_seconds_max), deadline)

    def _token_ids(
        self, request: pb.CommitRequest, namespace: OpenedNamespace, hashes: PackedHashes
    ) -> TokenIds:
        """Token ids by block, if somebody watches."""
        if not request.token_ids:
            return {}
        size = namespace.spec.block_tokens
        if len(request.token_ids) != len(hashes) * size:
            raise BadRequest(
                f"{len(request.token_ids)} token_ids: send {size} a block for "
                f"{len(hashes)} blocks, or none"
            )
        if not self._watch.is_watched(NamespaceId(namespace.id)):
            return {}
        return {
            one: request.token_ids[place * size : place * size + size]
            for place, one in enumerate(hashes)
        }


def _slot_tiers(granted: ins.LeaseGranted) -> bytes:
    # False and True are the protocol's 0 and 1.
    return b"" if granted.is_direct is None else granted.is_direct.tobytes()  # gil-ok: 32 KiB


async def _send_pending(send: Send, reply: ins.LeasePending) -> None:
    pending = pb.AcquirePending(
        matched_count=reply.matched_count, memory_count=reply.memory_count, lease_id=reply.lease
    )
    await send(pb.AcquireResponse(pending=pending))


def _check_count(name: str, count: int, count_max: int) -> None:
    if count > count_max:
        raise BadRequest(f"{name}: {count}, at most {count_max} a call")


def _commit_event(
    request: pb.CommitRequest, session: SessionId, namespace: OpenedNamespace, hashes: PackedHashes
) -> ev.Commit:
    """Raises BadRequest when the request's lists do not fit together."""
    count = len(hashes)
    if len(request.slots) != count:
        raise BadRequest(f"{count} hashes for {len(request.slots)} slots: send one a slot")
    if len(request.checksums) not in (0, count):
        raise BadRequest(f"{len(request.checksums)} checksums for {count} blocks: one each or none")
    size = namespace.spec.hash_bytes
    if len(request.parent) not in (0, size):
        raise BadRequest(f"parent has {len(request.parent)} bytes: a hash here has {size}, or none")
    return ev.Commit(
        session=session,
        namespace=namespace.id,
        hashes=hashes,
        slots=slots_from(request.slots),
        parent=BlockHash(request.parent) if request.parent else None,
        epoch=request.epoch,
        checksums=np.fromiter(request.checksums, np.uint64) if request.checksums else None,
    )
