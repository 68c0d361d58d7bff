"""The asyncio client: the names and promises of `Client`, awaitable.

A client belongs to the event loop of its first call. Cancelling a call that changes state (such as
`asyncio.timeout` around `reserve`) leaves its effect unknown and so costs a new session: give
`timeout_seconds` instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from kvtier.checksum import ByteView
from kvtier.client import calls, plans
from kvtier.client.aio_rpc import AioRpc
from kvtier.client.base import ClientBase
from kvtier.client.calls import A, Q
from kvtier.client.client import WATCH_WAIT_SECONDS
from kvtier.client.codec import Hashes
from kvtier.client.link import OpenSession
from kvtier.client.plans import Plan
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


class AsyncClient(ClientBase):
    """See `Client`; each call does the same here."""

    _rpc: AioRpc | None = None
    _rpc_session: OpenSession | None = None

    async def wait_connected(self, timeout_seconds: float) -> bool:
        return await self._wait_until(lambda: self.connected, timeout_seconds)

    async def wait_namespace(self, namespace: Namespace, timeout_seconds: float) -> bool:
        await self._wait_until(
            lambda: self._link.is_open(namespace) or namespace.error is not None, timeout_seconds
        )
        return self._link.is_open(namespace)

    # ------------------------------------------------------------------------------------ engine

    async def match(
        self,
        namespace: Namespace,
        hashes: Hashes,
        *,
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> PrefixMatch:
        return await self._unary(
            self._plans.match(namespace, hashes, timeout_seconds, request_id=request_id)
        )

    async def acquire(
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
        plan = self._plans.acquire(
            namespace,
            hashes,
            lease_seconds=lease_seconds,
            wait_seconds=wait_seconds,
            skip_count=skip_count,
            timeout_seconds=timeout_seconds,
            request_id=request_id,
        )
        rpc, answers = self._rpc_of(plan.session), plan.answers
        with self._acquiring(plan):
            if wait_seconds == 0:  # Exactly one message, then: read it as the cheaper unary call.
                call = rpc.unary(plan.call)
                answers.add(await call(plan.request, timeout=plan.timeout_seconds))
            else:
                stream = rpc.answer_stream(plan.call)(plan.request, timeout=plan.timeout_seconds)
                try:
                    async for answer in stream:
                        answers.add(answer)
                finally:
                    stream.cancel()
        assert answers.lease is not None, "the bracket raises without one"
        return answers.lease

    async def release(self, leases: Sequence[Lease], worth: Worth | None = None) -> int:
        plan = self._plans.release(leases, worth)
        return 0 if plan is None else await self._unary(plan)

    async def reserve(self, namespace: Namespace, count: int) -> Reservation:
        return await self._unary(self._plans.reserve(namespace, count))

    async def commit(
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
        return await self._unary(plan)

    async def abort(
        self, namespace: Namespace, slots: Slots | Sequence[int], *, session: SessionRef
    ) -> int:
        return await self._unary(self._plans.abort(namespace, slots, session=session))

    async def prefetch(self, namespace: Namespace, hashes: Hashes) -> PrefetchResult:
        return await self._unary(self._plans.prefetch(namespace, hashes))

    async def hint(
        self,
        namespace: Namespace,
        hashes: Hashes,
        *,
        session_end: bool = False,
        paused_seconds: float | None = None,
        turn_kind: str | None = None,
    ) -> bool:
        plan = self._plans.hint(
            namespace,
            hashes,
            session_end=session_end,
            paused_seconds=paused_seconds,
            turn_kind=turn_kind,
        )
        return await self._unary(plan)

    # ---------------------------------------------------------------------------------- by value

    async def put(
        self,
        namespace: Namespace,
        blocks: Sequence[tuple[bytes, ByteView]],
        parent: bytes | None = None,
    ) -> PutResult:
        plan = self._plans.put(namespace, blocks, parent)
        with self._reported(plan):
            answer = await self._rpc_of(plan.session).request_stream(calls.PUT)(
                plan.messages, timeout=plan.timeout_seconds
            )
        return plans.put_result(answer)

    async def get(self, namespace: Namespace, hashes: Hashes) -> list[bytes]:
        plan = self._plans.get(namespace, hashes)
        with self._reported(plan):
            stream = self._rpc_of(plan.session).answer_stream(calls.GET)(
                plan.request, timeout=plan.timeout_seconds
            )
            try:
                async for piece in stream:
                    plan.assembler.add(piece)
            finally:
                stream.cancel()
        return plan.assembler.finish()

    # ------------------------------------------------------------------------------------- admin

    async def evict(self, namespace: Namespace, hashes: Hashes) -> EvictResult:
        return await self._unary(self._plans.evict(namespace, hashes))

    async def pin(self, namespace: Namespace, hashes: Hashes, *, hold_seconds: float) -> Lease:
        return await self._unary(self._plans.pin(namespace, hashes, hold_seconds))

    async def clear(self, namespace: Namespace) -> int:
        return await self._unary(self._plans.clear(namespace))

    async def purge(self, request: pb.PurgeRequest) -> pb.PurgeResponse:
        return await self._unary(self._plans.purge(request))

    async def drain(self, *, resume: bool = False) -> pb.DrainResponse:
        return await self._unary(self._plans.drain(resume=resume))

    async def check(self) -> pb.CheckResponse:
        return await self._unary(self._plans.check())

    async def explain(self, *, block: bytes = b"", request_id: str = "") -> pb.ExplainResponse:
        """Where a prefix is, by the hash of its last block; or how an engine's request fared."""
        return await self._unary(self._plans.explain(block=block, request_id=request_id))

    async def list_page(self, namespace_id: int, row_first: int = 0) -> pb.ListResponse:
        return await self._unary(self._plans.list_page(namespace_id, row_first))

    async def stats(self) -> pb.StatsResponse:
        return await self._unary(self._plans.stats())

    async def watch(self, namespace: Namespace) -> AsyncIterator[pb.WatchResponse]:
        is_first = True
        while not self._link.is_closing():
            if not await self.wait_namespace(namespace, WATCH_WAIT_SECONDS):
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
            stream = self._rpc_of(session).answer_stream(calls.WATCH)(request)
            try:
                async for event in stream:
                    yield event
            except grpc.RpcError as error:
                failed = self._link.failed(session, False, error.code(), error.details())
                if not plans.is_worth_waiting(failed):
                    raise failed from None
            except asyncio.CancelledError:
                # The channel was closed with its session; or it is our own task that is cancelled.
                if self._rpc_session is session and not self._link.is_closing():
                    raise
            finally:
                stream.cancel()

    async def close(self) -> None:
        rpc, self._rpc, self._rpc_session = self._rpc, None, None
        await asyncio.to_thread(self._close_link)
        if rpc is not None:
            await rpc.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------ helpers

    def _rpc_of(self, session: OpenSession) -> AioRpc:
        """The loop's own channel to the session's daemon, made anew with each session."""
        if self._rpc is None or self._rpc_session is not session:
            if self._rpc is not None:
                self._rpc.close_soon()
            tls = self._link.settings.tls
            self._rpc, self._rpc_session = AioRpc(session.grpc_address, tls), session
        return self._rpc

    async def _wait_until(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # The loop was closed in the meantime.
                loop.call_soon_threadsafe(changed.set)

        self._link.add_listener(tell)
        try:
            async with asyncio.timeout(timeout_seconds):
                while not condition() and not self._link.is_closing():
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            pass
        finally:
            self._link.remove_listener(tell)
        return condition()

    async def _unary(self, plan: Plan[Q, A, T]) -> T:
        with self._reported(plan):
            answer = await self._rpc_of(plan.session).unary(plan.call)(
                plan.request, timeout=plan.timeout_seconds
            )
        return plan.parse(answer)
