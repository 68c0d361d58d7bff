"""Administration: evict, pin, clear, drain, check, explain; and stats for everybody."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import DAEMON_SESSION
from kvtier.errors import BadRequest
from kvtier.server.base import Base
from kvtier.server.calls import Handlers
from kvtier.server.explain import Explainer
from kvtier.server.finish import finish
from kvtier.server.leasing import PIN_WAIT_SECONDS, Leasing
from kvtier.server.namespaces import OpenedNamespace
from kvtier.server.remote_tier import RemoteKeeper
from kvtier.server.reporter import Reporter
from kvtier.server.security import Caller
from kvtier.server.wire import check_packed
from kvtier.types import Cut, PackedHashes
from kvtier.v1 import kvtier_pb2 as pb

PIN_MS_MAX = 24 * 3600 * 1000


class AdminCalls:
    """Each method is one RPC; who may call it was checked before (calls.py)."""

    def __init__(
        self,
        base: Base,
        reporter: Reporter,
        explainer: Explainer,
        leasing: Leasing,
        check_pool: Callable[[], list[str]],
        remote: RemoteKeeper | None = None,
    ) -> None:
        self._core = base.core
        self._namespaces = base.namespaces
        self._reporter = reporter
        self._explainer = explainer
        self._leasing = leasing
        self._clock = base.clock
        self._check_pool = check_pool
        self._remote = remote

    def add_to(self, handlers: Handlers) -> None:
        handlers.unary |= {
            "Evict": self.evict,
            "Pin": self.pin,
            "Clear": self.clear,
            "Drain": self.drain,
            "Check": self.check,
            "Explain": self.explain,
            "List": self.list_blocks,
            "Stats": self.stats,
        }

    async def evict(self, request: pb.EvictRequest, caller: Caller) -> pb.EvictResponse:
        namespace, hashes = self._hashes_of(request, caller)
        reply = await self._core.run(ev.Evict(namespace.id, hashes))
        assert isinstance(reply, ins.Evicted), "Evict has one kind of reply"
        return pb.EvictResponse(evicted_count=reply.evicted_count, kept_count=reply.kept_count)

    async def pin(self, request: pb.PinRequest, caller: Caller) -> pb.PinResponse:
        """A lease of the daemon's own: it outlives the administrator's session."""
        namespace, hashes = self._hashes_of(request, caller)
        if not 1 <= request.hold_ms <= PIN_MS_MAX:
            raise BadRequest(f"hold_ms is {request.hold_ms}: pin for 1 ms to a day")
        now = self._clock.now()
        deadline = now + request.hold_ms / 1e3
        wait_until = min(now + PIN_WAIT_SECONDS, deadline)
        reply = await self._leasing.acquire(
            ev.Acquire(DAEMON_SESSION, namespace.id, hashes, deadline, wait_until=wait_until)
        )
        if reply is None:
            return pb.PinResponse(cut=cast("pb.Cut", int(Cut.DEADLINE)))
        return pb.PinResponse(
            lease_id=reply.lease or 0,
            pinned_count=reply.leased_count,
            cut=cast("pb.Cut", int(reply.cut)),
        )

    async def clear(self, request: pb.ClearRequest, caller: Caller) -> pb.ClearResponse:
        namespace = self._namespaces.get_for(request.namespace_id, caller.tenant)
        # Also for a caller that has gone: a clear that stops half way turns the remote tier off.
        cleared = await finish(self._clear(namespace))
        return pb.ClearResponse(epoch=cleared.epoch, voided_count=cleared.voided_count)

    async def drain(self, request: pb.DrainRequest, _: Caller) -> pb.DrainResponse:
        self._core.post(ev.DrainEnded() if request.resume else ev.DrainStarted())
        stats = self._core.stats()
        return pb.DrainResponse(
            draining=stats.draining,
            lease_count=stats.lease_count,
            reserved_count=sum(one.reserved_count for one in stats.namespaces),
        )

    async def check(self, request: pb.CheckRequest, _: Caller) -> pb.CheckResponse:
        """Holds the event loop: what is checked must not change meanwhile."""
        started = self._clock.now()
        violations = self._core.check_invariants() + self._check_pool()
        return pb.CheckResponse(
            violations=violations,
            block_count=sum(one.block_count for one in self._core.stats().namespaces),
            check_us=int((self._clock.now() - started) * 1e6),
        )

    async def explain(self, request: pb.ExplainRequest, caller: Caller) -> pb.ExplainResponse:
        return self._explainer.explain(request, caller.peer)

    async def list_blocks(self, request: pb.ListRequest, caller: Caller) -> pb.ListResponse:
        namespace = self._namespaces.get_for(request.namespace_id, caller.tenant)
        page = self._core.listing(namespace.id, request.row_first)
        return pb.ListResponse(hashes=page.packed, tiers=page.tiers, row_next=page.row_next)

    async def stats(self, request: pb.StatsRequest, caller: Caller) -> pb.StatsResponse:
        answer = self._reporter.stats_response(caller.peer)
        answer.slow_calls.extend(self._explainer.slow_calls(caller.peer))
        return answer

    async def _clear(self, namespace: OpenedNamespace) -> ins.Cleared:
        if self._remote is None:
            return await self._namespaces.clear(namespace)
        number = await self._remote.begin_clear(namespace.id)
        cleared = await self._namespaces.clear(namespace)
        await self._remote.end_clear(namespace.id, number)
        return cleared

    def _hashes_of(
        self, request: pb.EvictRequest | pb.PinRequest, caller: Caller
    ) -> tuple[OpenedNamespace, PackedHashes]:
        namespace = self._namespaces.get_for(request.namespace_id, caller.tenant)
        check_packed(request.hashes, namespace.spec.hash_bytes)
        return namespace, PackedHashes(request.hashes, namespace.spec.hash_bytes)
