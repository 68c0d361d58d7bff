"""Purge: whose it may be, and how it fares."""

from __future__ import annotations

from kvtier.errors import BadRequest, Forbidden
from kvtier.server.calls import Handlers
from kvtier.server.epochs import FINGERPRINT_BYTES
from kvtier.server.namespaces import Namespaces
from kvtier.server.purge_records import RUNNING
from kvtier.server.purging import Purging
from kvtier.server.security import Caller, Rights
from kvtier.v1 import kvtier_pb2 as pb


class PurgeCalls:
    """One RPC; that the caller is an administrator was checked before (calls.py)."""

    def __init__(self, namespaces: Namespaces, purging: Purging) -> None:
        self._namespaces = namespaces
        self._purging = purging

    def add_to(self, handlers: Handlers) -> None:
        handlers.unary["Purge"] = self.purge

    async def purge(self, request: pb.PurgeRequest, caller: Caller) -> pb.PurgeResponse:
        """Begins one, or tells how it fares."""
        if request.WhichOneof("about") == "purge":
            purge = self._purging.get(request.purge)
            is_own = purge.record.asked_by == caller.tenant
            if not is_own and caller.peer.rights < Rights.OPERATOR:
                raise BadRequest(f"no purge {request.purge} of yours")
        else:
            tenant, fingerprints = await self._to_purge(request, caller)
            purge = await self._purging.begin(tenant, fingerprints, caller.tenant)
        record, progress = purge.record, purge.progress
        ended = purge.ended.is_set()
        return pb.PurgeResponse(
            purge=record.id,
            state=record.state if ended else RUNNING,
            step=progress.step,
            waits=progress.waits,
            done_bytes=progress.done_bytes,
            report=record.to_json() if ended else "",
        )

    async def _to_purge(self, request: pb.PurgeRequest, caller: Caller) -> tuple[str, list[bytes]]:
        """The tenant, or "", and the fingerprints that are meant."""
        match request.WhichOneof("about"):
            case "tenant":
                tenant = request.tenant
                found = await self._namespaces.fingerprints_of(tenant)
                if not found and caller.peer.rights >= Rights.OPERATOR:
                    raise BadRequest(f"nothing is known of a tenant {tenant!r}")
            case "namespace_id":
                opened = self._namespaces.get_for(request.namespace_id, caller.tenant)
                return "", [opened.fingerprint]
            case "fingerprint":
                if len(request.fingerprint) != FINGERPRINT_BYTES:
                    raise BadRequest(f"a fingerprint has {FINGERPRINT_BYTES} bytes")
                tenant, found = "", {request.fingerprint}
            case _:
                raise BadRequest("name a tenant or a namespace to be purged")
        if caller.peer.rights < Rights.OPERATOR:
            mine = await self._namespaces.fingerprints_of(caller.tenant)
            if (tenant and tenant != caller.tenant) or not found <= mine:
                raise Forbidden("this is not of your tenant: only the operator may purge it")
        return tenant, sorted(found)
