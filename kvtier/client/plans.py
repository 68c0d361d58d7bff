"""What each call sends and how its answer is read; no I/O.

The two faces of the client, sync and asyncio, only carry plans out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.checksum import ByteView
from kvtier.client import calls, codec
from kvtier.client.calls import A, AnyCall, Call, Q
from kvtier.client.codec import Hashes
from kvtier.client.link import Link, OpenSession
from kvtier.client.values import (
    EvictResult,
    Lease,
    Namespace,
    PrefetchResult,
    PutResult,
    Reservation,
    SessionRef,
    Slots,
)
from kvtier.errors import (
    BadRequest,
    Draining,
    FdPassingUnavailable,
    KVTierError,
    StaleSlot,
    Unauthenticated,
    Unavailable,
    UnknownNamespace,
)
from kvtier.types import REQUEST_ID_CHARS_MAX, CommitOutcome, PrefixMatch, Worth
from kvtier.v1 import kvtier_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan(Generic[Q, A, T]):
    """One call, ready to be sent under one session."""

    call: Call[Q, A]
    request: Q
    timeout_seconds: float
    session: OpenSession
    parse: Callable[[A], T]


@dataclass(frozen=True, slots=True)
class PutPlan:
    """A put: its messages are cut while they are sent."""

    messages: Iterator[pb.PutRequest]
    timeout_seconds: float
    session: OpenSession
    call: Call[pb.PutRequest, pb.PutResponse] = calls.PUT


@dataclass(frozen=True, slots=True)
class GetPlan:
    """A get: its pieces are put together while they come."""

    request: pb.GetRequest
    timeout_seconds: float
    session: OpenSession
    assembler: codec.BlockAssembler
    call: Call[pb.GetRequest, pb.GetResponse] = calls.GET


@dataclass(frozen=True, slots=True)
class AcquirePlan:
    """An acquire: its answers are gathered while it waits."""

    request: pb.AcquireRequest
    timeout_seconds: float
    session: OpenSession
    answers: codec.AcquireAnswers
    call: Call[pb.AcquireRequest, pb.AcquireResponse] = calls.ACQUIRE


class AnyPlan(Protocol):
    """What a failed call is reported with."""

    @property
    def session(self) -> OpenSession: ...

    @property
    def call(self) -> AnyCall: ...


class Plans:
    """Builds plans for the link's current session; raises Unavailable when there is none."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._settings = link.settings

    # ------------------------------------------------------------------------------------ engine

    def match(
        self,
        namespace: Namespace,
        hashes: Hashes,
        timeout_seconds: float | None,
        *,
        request_id: str = "",
    ) -> Plan[pb.MatchRequest, pb.MatchResponse, PrefixMatch]:
        session, state = self._link.begin(namespace)
        request = pb.MatchRequest(
            token=state.token,
            namespace_id=state.namespace_id,
            hashes=codec.packed_hashes(hashes, namespace.spec.hash_bytes),
            request_id=request_id[:REQUEST_ID_CHARS_MAX],
        )
        timeout = timeout_seconds or self._settings.timeout_seconds
        return Plan(calls.MATCH, request, timeout, session, codec.match_of)

    def acquire(
        self,
        namespace: Namespace,
        hashes: Hashes,
        *,
        lease_seconds: float | None,
        wait_seconds: float,
        skip_count: int,
        timeout_seconds: float | None,
        request_id: str = "",
    ) -> AcquirePlan:
        """The wait comes on top of the call's own deadline."""
        session, state = self._link.begin(namespace)
        _need_slots(session)
        wanted_ns = int((lease_seconds or self._settings.lease_seconds) * 1e9)
        request = pb.AcquireRequest(
            token=state.token,
            namespace_id=state.namespace_id,
            hashes=codec.packed_hashes(hashes, namespace.spec.hash_bytes),
            deadline_ns=self._link.clock.now_ns() + min(wanted_ns, session.lease_ns_max),
            wait_ms=int(wait_seconds * 1000),
            skip_count=skip_count,
            request_id=request_id[:REQUEST_ID_CHARS_MAX],
        )
        timeout = (timeout_seconds or self._settings.timeout_seconds) + wait_seconds
        return AcquirePlan(request, timeout, session, codec.AcquireAnswers(session.ref))

    def release(
        self, leases: Sequence[Lease], worth: Worth | None = None
    ) -> Plan[pb.ReleaseRequest, pb.ReleaseResponse, int] | None:
        """None when no lease is of the current session: those of lost ones end without us."""
        session = self._link.begin_any()
        lease_ids = [
            lease.lease_id
            for lease in leases
            if lease.lease_id is not None and lease.session == session.ref
        ]
        if not lease_ids:
            return None
        request = pb.ReleaseRequest(token=session.token, lease_ids=lease_ids)
        if worth is not None:
            request.prefill_seconds = worth.prefill_seconds
            request.onboard_seconds = worth.onboard_seconds
        timeout = self._settings.timeout_seconds
        return Plan(calls.RELEASE, request, timeout, session, lambda a: a.ended_count)

    def reserve(
        self, namespace: Namespace, count: int
    ) -> Plan[pb.ReserveRequest, pb.ReserveResponse, Reservation]:
        session, state = self._link.begin(namespace)
        _need_slots(session)
        request = pb.ReserveRequest(token=state.token, namespace_id=state.namespace_id, count=count)
        return Plan(
            calls.RESERVE,
            request,
            self._settings.timeout_seconds,
            session,
            lambda answer: codec.reservation_of(answer, session.ref),
        )

    def commit(
        self,
        namespace: Namespace,
        hashes: Hashes,
        slots: Slots | Sequence[int],
        *,
        parent: bytes | None = None,
        session: SessionRef,
        epoch: int,
        checksums: Sequence[int] | npt.NDArray[np.uint64] | None = None,
        token_ids: Sequence[int] = (),
    ) -> Plan[pb.CommitRequest, pb.CommitResponse, list[CommitOutcome]]:
        opened, state = self._link.begin(namespace)
        _need_current(opened, session)
        packed = codec.packed_hashes(hashes, namespace.spec.hash_bytes)
        count = len(packed) // namespace.spec.hash_bytes
        if len(slots) != count or (checksums is not None and len(checksums) != count):
            raise BadRequest(f"{count} hashes need {count} slots (and checksums, if any)")
        request = pb.CommitRequest(
            token=state.token,
            namespace_id=state.namespace_id,
            hashes=packed,
            slots=codec.slot_list(slots),
            parent=_parent_bytes(namespace, parent),
            epoch=epoch,
            token_ids=token_ids,
        )
        if checksums is not None:
            request.checksums.extend(int(value) for value in checksums)
        timeout = self._settings.timeout_seconds
        return Plan(calls.COMMIT, request, timeout, opened, lambda a: codec.outcomes_of(a, count))

    def abort(
        self, namespace: Namespace, slots: Slots | Sequence[int], *, session: SessionRef
    ) -> Plan[pb.AbortRequest, pb.AbortResponse, int]:
        opened, state = self._link.begin(namespace)
        _need_current(opened, session)
        request = pb.AbortRequest(
            token=state.token, namespace_id=state.namespace_id, slots=codec.slot_list(slots)
        )
        timeout = self._settings.timeout_seconds
        return Plan(calls.ABORT, request, timeout, opened, lambda a: a.freed_count)

    def prefetch(
        self, namespace: Namespace, hashes: Hashes
    ) -> Plan[pb.PrefetchRequest, pb.PrefetchResponse, PrefetchResult]:
        session, state = self._link.begin(namespace)
        request = pb.PrefetchRequest(
            token=state.token,
            namespace_id=state.namespace_id,
            hashes=codec.packed_hashes(hashes, namespace.spec.hash_bytes),
        )
        return Plan(
            calls.PREFETCH,
            request,
            self._settings.timeout_seconds,
            session,
            lambda a: PrefetchResult(a.memory_count, a.promoting_count),
        )

    def hint(
        self,
        namespace: Namespace,
        hashes: Hashes,
        *,
        session_end: bool,
        paused_seconds: float | None,
        turn_kind: str | None,
    ) -> Plan[pb.HintRequest, pb.HintResponse, bool]:
        given = [session_end, paused_seconds is not None, turn_kind is not None]
        if sum(given) != 1:
            raise BadRequest("a hint is one of session_end, paused_seconds and turn_kind")
        session, state = self._link.begin(namespace)
        request = pb.HintRequest(
            token=state.token,
            namespace_id=state.namespace_id,
            hashes=codec.packed_hashes(hashes, namespace.spec.hash_bytes),
        )
        if session_end:
            request.session_end = True
        elif paused_seconds is not None:
            request.paused_ms = int(paused_seconds * 1000)
        else:
            request.turn_kind = turn_kind or ""
        return Plan(calls.HINT, request, self._settings.timeout_seconds, session, lambda a: a.used)

    # ---------------------------------------------------------------------------------- by value

    def put(
        self,
        namespace: Namespace,
        blocks: Sequence[tuple[bytes, ByteView]],
        parent: bytes | None,
    ) -> PutPlan:
        codec.check_put(blocks, namespace.spec.hash_bytes, namespace.block_bytes)
        session, state = self._link.begin(namespace)
        head = pb.PutRequest(
            token=state.token,
            namespace_id=state.namespace_id,
            parent=_parent_bytes(namespace, parent),
        )
        messages = codec.put_messages(head, blocks)
        return PutPlan(messages, self._settings.stream_timeout_seconds, session)

    def get(self, namespace: Namespace, hashes: Hashes) -> GetPlan:
        session, state = self._link.begin(namespace)
        packed = codec.packed_hashes(hashes, namespace.spec.hash_bytes)
        count = len(packed) // namespace.spec.hash_bytes
        request = pb.GetRequest(token=state.token, namespace_id=state.namespace_id, hashes=packed)
        assembler = codec.BlockAssembler(namespace.block_bytes, namespace.spec.shard_bytes, count)
        return GetPlan(request, self._settings.stream_timeout_seconds, session, assembler)

    # ------------------------------------------------------------------------------------- admin

    def evict(
        self, namespace: Namespace, hashes: Hashes
    ) -> Plan[pb.EvictRequest, pb.EvictResponse, EvictResult]:
        session, state = self._link.begin(namespace)
        request = pb.EvictRequest(
            token=state.token,
            namespace_id=state.namespace_id,
            hashes=codec.packed_hashes(hashes, namespace.spec.hash_bytes),
        )
        return Plan(
            calls.EVICT,
            request,
            self._settings.admin_timeout_seconds,
            session,
            lambda a: EvictResult(a.evicted_count, a.kept_count),
        )

    def pin(
        self, namespace: Namespace, hashes: Hashes, hold_seconds: float
    ) -> Plan[pb.PinRequest, pb.PinResponse, Lease]:
        session, state = self._link.begin(namespace)
        request = pb.PinRequest(
            token=state.token,
            namespace_id=state.namespace_id,
            hashes=codec.packed_hashes(hashes, namespace.spec.hash_bytes),
            hold_ms=int(hold_seconds * 1000),
        )
        deadline_ns = self._link.clock.now_ns() + int(hold_seconds * 1e9)
        return Plan(
            calls.PIN,
            request,
            self._settings.admin_timeout_seconds,
            session,
            lambda a: codec.pin_of(a, session.ref, deadline_ns, state.epoch),
        )

    def clear(self, namespace: Namespace) -> Plan[pb.ClearRequest, pb.ClearResponse, int]:
        session, state = self._link.begin(namespace)
        request = pb.ClearRequest(token=state.token, namespace_id=state.namespace_id)
        timeout = self._settings.admin_timeout_seconds
        return Plan(calls.CLEAR, request, timeout, session, lambda a: a.epoch)

    def purge(
        self, request: pb.PurgeRequest
    ) -> Plan[pb.PurgeRequest, pb.PurgeResponse, pb.PurgeResponse]:
        session = self._link.begin_any()
        request.token = session.token
        timeout = self._settings.admin_timeout_seconds
        return Plan(calls.PURGE, request, timeout, session, lambda a: a)

    def drain(self, *, resume: bool) -> Plan[pb.DrainRequest, pb.DrainResponse, pb.DrainResponse]:
        session = self._link.begin_any()
        request = pb.DrainRequest(token=session.token, resume=resume)
        timeout = self._settings.admin_timeout_seconds
        return Plan(calls.DRAIN, request, timeout, session, lambda a: a)

    def check(self) -> Plan[pb.CheckRequest, pb.CheckResponse, pb.CheckResponse]:
        session = self._link.begin_any()
        timeout = self._settings.admin_timeout_seconds
        request = pb.CheckRequest(token=session.token)
        return Plan(calls.CHECK, request, timeout, session, lambda a: a)

    def list_page(
        self, namespace_id: int, row_first: int
    ) -> Plan[pb.ListRequest, pb.ListResponse, pb.ListResponse]:
        session = self._link.begin_any()
        timeout = self._settings.admin_timeout_seconds
        request = pb.ListRequest(
            token=session.token, namespace_id=namespace_id, row_first=row_first
        )
        return Plan(calls.LIST, request, timeout, session, lambda a: a)

    def stats(self) -> Plan[pb.StatsRequest, pb.StatsResponse, pb.StatsResponse]:
        session = self._link.begin_any()
        timeout = self._settings.admin_timeout_seconds
        request = pb.StatsRequest(token=session.token)
        return Plan(calls.STATS, request, timeout, session, lambda a: a)

    def explain(
        self, *, block: bytes = b"", request_id: str = ""
    ) -> Plan[pb.ExplainRequest, pb.ExplainResponse, pb.ExplainResponse]:
        session = self._link.begin_any()
        timeout = self._settings.admin_timeout_seconds
        request = pb.ExplainRequest(token=session.token)
        if block:
            request.hash = block
        else:
            request.request_id = request_id
        return Plan(calls.EXPLAIN, request, timeout, session, lambda a: a)

    def watch(self, namespace: Namespace) -> tuple[OpenSession, pb.WatchRequest]:
        session, state = self._link.begin(namespace)
        return session, pb.WatchRequest(token=state.token, namespace_id=state.namespace_id)


def put_result(answer: pb.PutResponse) -> PutResult:
    return PutResult(answer.ready_count, answer.present_count, answer.refused_count)


def is_worth_waiting(error: KVTierError) -> bool:
    """Whether a watch goes on after this failure: the session comes back by itself."""
    return isinstance(error, Unavailable | Unauthenticated | Draining | UnknownNamespace)


def _parent_bytes(namespace: Namespace, parent: bytes | None) -> bytes:
    if parent is not None and len(parent) != namespace.spec.hash_bytes:
        raise BadRequest(f"the parent's hash is {namespace.spec.hash_bytes} bytes long, or None")
    return parent or b""


def _need_slots(session: OpenSession) -> None:
    if session.by_value:
        raise FdPassingUnavailable(
            "no slots in a by-value session: use put and get " + session.by_value_reason
        )


def _need_current(opened: OpenSession, session: SessionRef) -> None:
    if session != opened.ref:
        raise StaleSlot("slots of an earlier session: they return by themselves, drop them")
