"""What a call of an engine leaves behind: a place in the history, and a line where one is due."""

from __future__ import annotations

import logging

from kvtier.core.instructions import LeaseGranted
from kvtier.server.base import Base
from kvtier.server.history import RequestCall
from kvtier.server.namespaces import OpenedNamespace
from kvtier.server.security import Caller
from kvtier.types import Cut, NamespaceId, PackedHashes, PrefixMatch
from kvtier.v1 import kvtier_pb2 as pb

log = logging.getLogger(__name__)

_WITHOUT_LINE = (Cut.NONE, Cut.MISS)


class CallNotes:
    """Belongs to the event loop."""

    def __init__(self, base: Base) -> None:
        self._history = base.history
        self._clock = base.clock

    def matched(
        self,
        request: pb.MatchRequest,
        caller: Caller,
        namespace: OpenedNamespace,
        packed: bytes,
        found: PrefixMatch,
        *,
        seconds: float,
    ) -> None:
        """On the hot path: as good as nothing where all was found and nobody named a request.

        `packed` are the request's hashes: to ask it for them again is to copy them again.
        """
        size = namespace.spec.hash_bytes
        is_missed = found.matched_count * size < len(packed)
        if not (is_missed or request.request_id):
            return
        hashes = PackedHashes(packed, size)
        self._note(
            RequestCall(
                request_id=request.request_id,
                call="Match",
                session=caller.session,
                tenant=caller.tenant,
                namespace=namespace.id,
                at=self._clock.now(),
                seconds=seconds,
                hashes=hashes,
                asked_count=len(hashes),
                found_count=found.matched_count,
                tiers=found.tiers,
                cut=Cut.MISS if is_missed else Cut.NONE,
                missed=hashes[found.matched_count] if is_missed else None,
            )
        )

    def acquired(
        self,
        request: pb.AcquireRequest,
        caller: Caller,
        hashes: PackedHashes,
        granted: LeaseGranted | None,
        *,
        seconds: float,
    ) -> None:
        """`granted` is None when the deadline came first."""
        count = 0 if granted is None else granted.leased_count
        call = RequestCall(
            request_id=request.request_id,
            call="Acquire",
            session=caller.session,
            tenant=caller.tenant,
            namespace=NamespaceId(request.namespace_id),
            at=self._clock.now(),
            seconds=seconds,
            hashes=hashes,
            asked_count=len(hashes),
            found_count=count,
            tiers=() if granted is None else granted.tiers,
            cut=Cut.DEADLINE if granted is None else granted.cut,
            missed=hashes[count] if count < len(hashes) else None,
        )
        self._note(call)
        if call.cut not in _WITHOUT_LINE:
            log.info("acquire cut", extra=_facts(call))

    def _note(self, call: RequestCall) -> None:
        missed = call.missed
        if missed is not None:
            self._history.note_missed(call.namespace, missed, call.cut, call.at)
        if call.request_id:
            self._history.note_request(call)
            if log.isEnabledFor(logging.DEBUG):
                log.debug("request asked", extra=_facts(call))


def _facts(call: RequestCall) -> dict[str, object]:
    return {
        "request": call.request_id or None,
        "call": call.call,
        "session": call.session,
        "namespace": call.namespace,
        "asked": call.asked_count,
        "found": call.found_count,
        "tiers": " ".join(f"{tier}:{count}" for tier, count in call.tiers) or None,
        "cut": call.cut.name.lower(),
        "missed": None if call.missed is None else call.missed.hex(),
        "seconds": round(call.seconds, 6),
    }
