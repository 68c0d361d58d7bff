"""The namespaces in use: their short ids, epochs and geometry.

Invariants: one id a fingerprint in this life of the daemon; an epoch is durable before anybody is
told of it, so a Clear that was answered holds after a crash.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from kvtier.config_tenant import SHARED
from kvtier.core.events import Clear, NamespaceOpened
from kvtier.core.instructions import Cleared
from kvtier.errors import BadRequest, Forbidden, LimitExceeded, UnknownNamespace
from kvtier.layout import PAD_BYTES
from kvtier.namespace import NamespaceSpec
from kvtier.server.core_loop import CoreLoop
from kvtier.server.epochs import EpochStore
from kvtier.server.finish import finish
from kvtier.server.owners import Owners
from kvtier.server.security import Peer, Rights
from kvtier.server.wire import spec_from
from kvtier.types import NamespaceId
from kvtier.v1 import kvtier_pb2 as pb

SLOT_BYTES_MIN = 64  # A cache line: neighbours are written by different processes.


@dataclass(frozen=True, slots=True)
class OpenedNamespace:
    id: NamespaceId
    spec: NamespaceSpec
    fingerprint: bytes
    slot_bytes: int
    slot_count_max: int

    @property
    def payload_bytes(self) -> int:
        return self.spec.shard_bytes * self.spec.shard_count


def slot_stride(shard_bytes: int) -> int:
    """Distance of two slots: whole pages; below a page a power of two, so that none lies across
    two pages. Whole pages would cost small blocks up to 64 times their size."""
    if shard_bytes > mmap.PAGESIZE // 2:
        return -(-shard_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return max(SLOT_BYTES_MIN, 1 << (shard_bytes - 1).bit_length())


def padded_stride(shard_bytes: int) -> int:
    """The same where blocks go to NVMe and come back: what a disk reads and writes, padding
    included, lies inside the slot."""
    unit_bytes = max(mmap.PAGESIZE, PAD_BYTES)
    return -(-shard_bytes // unit_bytes) * unit_bytes


def _unknown(namespace: int) -> UnknownNamespace:
    return UnknownNamespace(
        f"namespace {namespace} is not of this life of the daemon: open it again"
    )


class Namespaces:
    """Opens and clears namespaces; lives on the event loop, writes records in a thread."""

    def __init__(
        self,
        core: CoreLoop,
        epochs: EpochStore,
        *,
        slab_bytes: int,
        slab_count_max: int,
        count_max: int,
        stride: Callable[[int], int] = slot_stride,
        shared: Mapping[str, frozenset[str]] | None = None,
        owners: Owners | None = None,
    ) -> None:
        """`count_max`: of each tenant. `shared`: models, each with the tenants that share it.
        `owners`: where it is written down whose they are; None where there is one tenant."""
        self._shared = shared or {}
        self._owners = owners
        self._core = core
        self._epochs = epochs
        self._slab_bytes = slab_bytes
        self._slab_count_max = slab_count_max
        self.count_max = count_max
        self._stride = stride
        # Waits while what would be opened, or its tenant, is purged.
        self.gate: Callable[[str, bytes], Awaitable[None]] | None = None
        self._on_opened: list[Callable[[OpenedNamespace], None]] = []
        self._by_id: dict[int, OpenedNamespace] = {}
        self._by_fingerprint: dict[bytes, OpenedNamespace] = {}
        # One opening or clearing at a time: the order of records is the order of events.
        self._changing = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._by_id)

    def owners(self) -> dict[bytes, str]:
        """Tenants by fingerprint, those of former lives too, as far as that is known."""
        return {} if self._owners is None else self._owners.known()

    def opened(self) -> Iterable[OpenedNamespace]:
        return list(self._by_id.values())

    def tell_opened(self, to: Callable[[OpenedNamespace], None]) -> None:
        """Call `to` with every namespace that is opened from now on, once the core knows it."""
        self._on_opened.append(to)

    def get(self, namespace: int) -> OpenedNamespace:
        """Raises UnknownNamespace."""
        found = self._by_id.get(namespace)
        if found is None:
            raise _unknown(namespace)
        return found

    def get_for(self, namespace: int, tenant: str) -> OpenedNamespace:
        """Raises UnknownNamespace, for another tenant's as for one that there is not."""
        found = self.get(namespace)
        if not self.is_seen(found, tenant):
            raise _unknown(namespace)
        return found

    def is_seen(self, opened: OpenedNamespace, tenant: str) -> bool:
        """Whether the tenant may know of it."""
        return opened.spec.tenant == self._owner(opened.spec.model, tenant)

    def seen_by(self, tenant: str) -> list[OpenedNamespace]:
        return [one for one in self._by_id.values() if self.is_seen(one, tenant)]

    async def open_for(self, message: pb.NamespaceSpec, peer: Peer) -> OpenedNamespace:
        """What a client asks for; raises BadRequest, and Forbidden where it may not."""
        spec = spec_from(message, peer.tenant, self._owner(message.model, peer.tenant))
        if peer.rights < Rights.ENGINE and spec.fingerprint() not in self._by_fingerprint:
            raise Forbidden("a reader opens no namespace that no engine has opened")
        if self.gate is not None:
            await self.gate(spec.tenant, spec.fingerprint())
        return await self.open(spec)

    def _owner(self, model: str, tenant: str) -> str:
        return SHARED if tenant in self._shared.get(model, ()) else tenant

    async def fingerprints_of(self, tenant: str) -> set[bytes]:
        """Of its namespaces, those of former lives too, as far as is known whose they are."""
        opened = {one.fingerprint for one in self._by_id.values() if one.spec.tenant == tenant}
        if self._owners is None:  # There is one tenant, and all is its own.
            return opened | set(await asyncio.to_thread(self._epochs.current_epochs))
        return opened | {one for one, name in self._owners.known().items() if name == tenant}

    def with_fingerprint(self, fingerprint: bytes) -> OpenedNamespace | None:
        """None when nobody has opened it in this life."""
        return self._by_fingerprint.get(fingerprint)

    async def keep_owners(self, on_nvme: Collection[bytes]) -> None:
        """Of which namespaces anything was found on NVMe; of those that are open there may be."""
        if self._owners is not None:
            async with self._changing:
                kept = {*on_nvme, *self._by_fingerprint}
                await asyncio.to_thread(self._owners.keep_only, kept)

    async def forget_owner(self, fingerprint: bytes) -> None:
        """Nothing is left of it; who opens it again is written down again."""
        if self._owners is not None:
            await asyncio.to_thread(self._owners.forget, fingerprint)

    async def void(self, fingerprint: bytes) -> int:
        """A new epoch, durable when this returns, whether or not it is open; how many blocks that
        voided at once."""
        opened = self._by_fingerprint.get(fingerprint)
        if opened is not None:
            return (await self.clear(opened)).voided_count
        await finish(asyncio.to_thread(self._epochs.renew, fingerprint))
        return 0

    async def open(self, spec: NamespaceSpec) -> OpenedNamespace:
        """The namespace of this spec, opened now if nobody did before."""
        fingerprint = spec.fingerprint()
        found = self._by_fingerprint.get(fingerprint)
        if found is not None:
            await self._note_owner(found)  # Perhaps forgotten since.
            return found
        return await finish(self._open(spec, fingerprint))

    async def clear(self, namespace: OpenedNamespace) -> Cleared:
        """Void every block of the namespace. The new epoch is durable first: a crash in between
        forgets the blocks, which is right either way."""
        return await finish(self._clear(namespace))

    async def _open(self, spec: NamespaceSpec, fingerprint: bytes) -> OpenedNamespace:
        async with self._changing:
            found = self._by_fingerprint.get(fingerprint)
            if found is not None:
                return found
            opened = self._describe(spec, fingerprint)
            epoch = await asyncio.to_thread(self._epochs.ensure, fingerprint)
            await self._note_owner(opened)
            self._core.post(
                NamespaceOpened(
                    namespace=opened.id,
                    epoch=epoch,
                    hash_bytes=spec.hash_bytes,
                    slot_bytes=opened.slot_bytes,
                    shard_count=spec.shard_count,
                    shard_bytes=spec.shard_bytes,
                    fingerprint=fingerprint,
                    chained=spec.chained,
                    block_tokens=spec.block_tokens,
                    tenant=spec.tenant,
                )
            )
            self._by_id[opened.id] = opened
            self._by_fingerprint[fingerprint] = opened
            for tell in self._on_opened:
                tell(opened)
            return opened

    async def _note_owner(self, namespace: OpenedNamespace) -> None:
        fingerprint, tenant = namespace.fingerprint, namespace.spec.tenant
        if self._owners is not None and self._owners.known_tenant(fingerprint) != tenant:
            await asyncio.to_thread(self._owners.note, fingerprint, tenant)

    async def _clear(self, namespace: OpenedNamespace) -> Cleared:
        async with self._changing:
            epoch = await asyncio.to_thread(self._epochs.renew, namespace.fingerprint)
            reply = await self._core.run(Clear(namespace.id, epoch))
        assert isinstance(reply, Cleared), "Clear has one kind of reply"
        return reply

    def _describe(self, spec: NamespaceSpec, fingerprint: bytes) -> OpenedNamespace:
        if sum(one.spec.tenant == spec.tenant for one in self._by_id.values()) >= self.count_max:
            raise LimitExceeded(
                f"{self.count_max} namespaces are open (server.namespaces_max): restart the "
                "daemon, or raise the limit"
            )
        slot_bytes = self._stride(spec.shard_bytes)
        if slot_bytes > self._slab_bytes:
            raise BadRequest(
                f"a shard of {spec.shard_bytes} bytes does not fit into a slab of "
                f"{self._slab_bytes}: raise dram.slab_bytes"
            )
        if spec.shard_count > self._slab_count_max:
            raise BadRequest(
                f"{spec.shard_count} shards need as many slabs, the budget has "
                f"{self._slab_count_max}: raise dram.bytes or lower dram.slab_bytes"
            )
        sets = self._slab_count_max // spec.shard_count
        return OpenedNamespace(
            id=NamespaceId(len(self._by_id) + 1),
            spec=spec,
            fingerprint=fingerprint,
            slot_bytes=slot_bytes,
            slot_count_max=sets * (self._slab_bytes // slot_bytes),
        )
