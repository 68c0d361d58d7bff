"""The synchronous client. Every call returns within its deadline, daemon or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from kvtier.checksum import ByteView
from kvtier.client import calls, plans
from kvtier.client.base import ClientBase
from kvtier.client.calls import A, Q
from kvtier.client.codec import Hashes
from kvtier.client.plans import Plan
from kvtier.client.rpc import cancel
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
from kvtier.errors import Unavailable
from kvtier.types import CommitOutcome, PrefixMatch, Worth
from kvtier.v1 import kvtier_pb2 as pb

T = TypeVar("T")

# How long a watch sleeps while there is no session, before it looks whether it was closed.
WATCH_WAIT_SECONDS = 1.0


class Client(ClientBase):
    """One process's connection to the daemon.

    Calls raise the daemon's named errors, and Unavailable when it does not answer in time or is
    not there; while it is known not to answer they do so in microseconds. Safe to use from every
    thread. In a forked child every call raises Unavailable.
    """

    def wait_connected(self, timeout_seconds: float) -> bool:
        return self._link.wait_until(lambda: self.connected, timeout_seconds)

    def wait_namespace(self, namespace: Namespace, timeout_seconds: float) -> bool:
        """Whether calls on the namespace pass; False at once when the daemon refuses it."""
        self._link.wait_until(
            lambda: self._link.is_open(namespace) or namespace.error is not None, timeout_seconds
        )
        return self._link.is_open(namespace)

    # ------------------------------------------------------------------------------------ engine

    def match(
        self,
        namespace: Namespace,
        hashes: Hashes,
        *,
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> PrefixMatch:
        """The longest resident prefix; `hashes` may be packed already.

        `request_id`: the engine's own, for the daemon's log and `kvtier explain`.
        """
        return self._unary(
            self._plans.match(namespace, hashes, timeout_seconds, request_id=request_id)
        )

    def acquire(
        self,
        namespace: Namespace,
        hashes: Hashes,
        *,
        lease_seconds: float | None = None,
        wait_seconds: float = 0.0,
        skip_count: int = 0,
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> Lease:
        """Lease the longest resident prefix and have it in memory.

        `wait_seconds`: how long promotion from lower tiers may take, beyond the call's deadline.
        0 takes what is in memory now. Other calls of this client are not held up meanwhile.
        `skip_count`: leading blocks the engine has itself; their slots are not told.
        """
        plan = self._plans.acquire(
            namespace,
            hashes,
            lease_seconds=lease_seconds,
            wait_seconds=wait_seconds,
            skip_count=skip_count,
            timeout_seconds=timeout_seconds,
            request_id=request_id,
        )
        rpc, answers = plan.session.rpc, plan.answers
        with self._acquiring(plan):
            if wait_seconds == 0:  # Exactly one message, then: read it as the cheaper unary call.
                answers.add(rpc.unary(plan.call)(plan.request, timeout=plan.timeout_seconds))
            else:
                stream = rpc.answer_stream(plan.call)(plan.request, timeout=plan.timeout_seconds)
                try:
                    for answer in stream:  # To its end: before that the lease may be taken back.
                        answers.add(answer)
                finally:
                    cancel(stream)
        assert answers.lease is not None, "the bracket raises without one"
        return answers.lease

    def release(self, leases: Sequence[Lease], worth: Worth | None = None) -> int:
        """How many leases this ended; those of lost sessions end without us."""
        plan = self._plans.release(leases, worth)
        return 0 if plan is None else self._unary(plan)

    def reserve(self, namespace: Namespace, count: int) -> Reservation:
        return self._unary(self._plans.reserve(namespace, count))

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
    ) -> list[CommitOutcome]:
        """Publish filled slots in chain order. Raises StaleSlot for slots of a lost session.

        `token_ids`: of all these blocks, one after the other, where the daemon said that it wants
        them (`Namespace.state`), or none.
        """
        plan = self._plans.commit(
            namespace,
            hashes,
            slots,
            parent=parent,
            session=session,
            epoch=epoch,
            checksums=checksums,
            token_ids=token_ids,
        )
        return self._unary(plan)

    def abort(
        self, namespace: Namespace, slots: Slots | Sequence[int], *, session: SessionRef
    ) -> int:
        """Give reserved slots back. Raises StaleSlot for slots of a lost session."""
        return self._unary(self._plans.abort(namespace, slots, session=session))

    def prefetch(self, namespace: Namespace, hashes: Hashes) -> PrefetchResult:
        return self._unary(self._plans.prefetch(namespace, hashes))

    def hint(
        self,
        namespace: Namespace,
        hashes: Hashes,
        *,
        session_end: bool = False,
        paused_seconds: float | None = None,
        turn_kind: str | None = None,
    ) -> bool:
        """Tell the policies about a user's session; whether the running one makes use of it."""
        plan = self._plans.hint(
            namespace,
            hashes,
            session_end=session_end,
            paused_seconds=paused_seconds,
            turn_kind=turn_kind,
        )
        return self._unary(plan)

    # ---------------------------------------------------------------------------------- by value

    def put(
        self,
        namespace: Namespace,
        blocks: Sequence[tuple[bytes, ByteView]],
        parent: bytes | None = None,
    ) -> PutResult:
        """Whole blocks (hash, bytes of all shards side by side) in chain order."""
        plan = self._plans.put(namespace, blocks, parent)
        with self._reported(plan):
            answer = plan.session.rpc.request_stream(calls.PUT)(
                plan.messages, timeout=plan.timeout_seconds
            )
        return plans.put_result(answer)

    def get(self, namespace: Namespace, hashes: Hashes) -> list[bytes]:
        """Whole blocks from the first one to the first gap.

        Raises CorruptReplica when bytes do not match their checksum: treat it as a miss.
        """
        plan = self._plans.get(namespace, hashes)
        with self._reported(plan):
            stream = plan.session.rpc.answer_stream(calls.GET)(
                plan.request, timeout=plan.timeout_seconds
            )
            try:
                for piece in stream:
                    plan.assembler.add(piece)
            finally:
                cancel(stream)
        return plan.assembler.finish()

    # ------------------------------------------------------------------------------------- admin

    def evict(self, namespace: Namespace, hashes: Hashes) -> EvictResult:
        return self._unary(self._plans.evict(namespace, hashes))

    def pin(self, namespace: Namespace, hashes: Hashes, *, hold_seconds: float) -> Lease:
        """A lease for administrators: no slots, up to a day."""
        return self._unary(self._plans.pin(namespace, hashes, hold_seconds))

    def clear(self, namespace: Namespace) -> int:
        """Void every block of the namespace; its new epoch."""
        return self._unary(self._plans.clear(namespace))

    def purge(self, request: pb.PurgeRequest) -> pb.PurgeResponse:
        """Begins one, or tells how it fares; see the protocol."""
        return self._unary(self._plans.purge(request))

    def drain(self, *, resume: bool = False) -> pb.DrainResponse:
        return self._unary(self._plans.drain(resume=resume))

    def check(self) -> pb.CheckResponse:
        return self._unary(self._plans.check())

    def explain(self, *, block: bytes = b"", request_id: str = "") -> pb.ExplainResponse:
        """Where a prefix is, by the hash of its last block; or how an engine's request fared."""
        return self._unary(self._plans.explain(block=block, request_id=request_id))

    def list_page(self, namespace_id: int, row_first: int = 0) -> pb.ListResponse:
        """Resident blocks, a page of them; the id as Stats tells it."""
        return self._unary(self._plans.list_page(namespace_id, row_first))

    def stats(self) -> pb.StatsResponse:
        return self._unary(self._plans.stats())

    def watch(self, namespace: Namespace) -> Iterator[pb.WatchResponse]:
        """Events of the namespace until the client is closed.

        After each reconnect comes EventsLost: what happened in between is unknown.
        """
        is_first = True
        while not self._link.is_closing():
            if not self.wait_namespace(namespace, WATCH_WAIT_SECONDS):
                if (error := namespace.error) is not None:
                    raise error
                continue
            try:
                session, request = self._plans.watch(namespace)
            except Unavailable:
                continue  # Lost again in between.
            if not is_first:
                yield pb.WatchResponse(lost=pb.EventsLost())
            is_first = False
            try:
                stream = session.rpc.answer_stream(calls.WATCH)(request)
                try:
                    yield from stream
                finally:
                    cancel(stream)
            except grpc.RpcError as error:
                failed = self._link.failed(session, False, error.code(), error.details())
                if not plans.is_worth_waiting(failed):
                    raise failed from None
            except ValueError:
                continue  # gRPC's word for a channel that was closed with its session.

    def close(self) -> None:
        """Say Bye and end; every later call raises Unavailable."""
        self._close_link()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------ helpers

    def _unary(self, plan: Plan[Q, A, T]) -> T:
        with self._reported(plan):
            answer = plan.session.rpc.unary(plan.call)(plan.request, timeout=plan.timeout_seconds)
        return plan.parse(answer)
