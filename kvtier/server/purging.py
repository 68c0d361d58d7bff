"""Purges: an end of all that a tenant or a namespace has, in every tier and in the books.

A purge is recorded before it begins (`purge_records.py`), and every step of it can be done again.
So one that was cut off, however, is taken up by the next life of the daemon: its epochs are renewed
before anything of that life is read, and whoever wants to open one of its namespaces waits until
the purge has ended. One purge runs at a time; who asks for the same one hears of the one there is.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.clock import wall_seconds
from kvtier.core.erasing_events import EraseBegun, EraseEnded
from kvtier.core.listing import TIER_BITS
from kvtier.errors import BadRequest, Draining, KVTierError
from kvtier.pools.dram import DramPool
from kvtier.server.base import Base
from kvtier.server.cxl_tier import CxlKeeper
from kvtier.server.namespaces import OpenedNamespace
from kvtier.server.nvme import NvmeKeeper
from kvtier.server.purge_records import (
    DONE,
    INCOMPLETE,
    RUNNING,
    PurgeRecord,
    PurgeRecords,
    TierReport,
)
from kvtier.server.purge_tiers import Erasable, Progress, erase_lower, erase_memory
from kvtier.server.remote_purge import RemotePurge
from kvtier.types import NamespaceId, TierName

log = logging.getLogger(__name__)

# Waiting and under way. Each is a file and a task; nobody has so many tenants to be rid of at once.
PURGES_MAX = 64
# What no daemon can reach, said in every report.
BEYOND = (
    "what calls by value and Mooncake's client have left in buffers: restart the daemon",
    "copies that an SSD keeps of sectors overwritten: use an encrypted pool, or its secure erase",
    "the record of the namespace's epochs: random numbers that must not be used again",
    "log lines, and recordings of the flight recorder: they name blocks by salted hashes only",
    "memory and disks of other nodes: purge there too",
)
OPEN = "the note whose a namespace is, for one that was opened since the daemon's start"


@dataclass(slots=True)
class Purge:
    """One that waits, is under way, or has ended in this life."""

    record: PurgeRecord
    progress: Progress = field(default_factory=Progress)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def concerns(self, tenant: str, fingerprint: bytes) -> bool:
        named = bool(self.record.tenant) and self.record.tenant == tenant
        return named or fingerprint.hex() in self.record.fingerprints


@dataclass(frozen=True, slots=True)
class PurgeBooks:
    """Where else something is remembered of a namespace, each with its name for the report."""

    of_namespace: tuple[tuple[str, Callable[[NamespaceId], None]], ...] = ()
    of_tenant: tuple[tuple[str, Callable[[str], None]], ...] = ()


class Purging:
    """Lives on the event loop."""

    def __init__(
        self,
        base: Base,
        pool: DramPool,
        records: PurgeRecords,
        books: PurgeBooks,
        *,
        cxl: CxlKeeper | None = None,
        nvme: NvmeKeeper | None = None,
        remote: RemotePurge | None = None,
    ) -> None:
        self._core, self._namespaces = base.core, base.namespaces
        self._pool = pool
        self._records = records
        self._books = books
        self._cxl, self._nvme, self._remote = cxl, nvme, remote
        self._purges: dict[str, Purge] = {}  # By id.
        self._turn = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        self._namespaces.gate = self._wait_ended

    async def void_unfinished(self) -> None:
        """Before anything is read that a former life has left: nothing of it counts for what was
        to be purged. Raises KVTierError where that cannot be written down."""
        for record in await asyncio.to_thread(self._records.read):
            if record.state == RUNNING:
                for fingerprint in record.spaces:
                    await self._namespaces.void(fingerprint)
                record.begun_count += 1
                await asyncio.to_thread(self._records.write, record)
                self._purges[record.id] = Purge(record)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Take up what a former life has not finished; returns at once."""
        self._tasks = tasks
        for purge in self._purges.values():
            self._spawn(purge)

    def stop(self) -> None:
        """Before the tiers end, or they would be found at fault: the next life goes on."""
        self._tasks = None
        for task in self._under_way:
            task.cancel()

    # ------------------------------------------------------------------------------- questions

    def get(self, purge_id: str) -> Purge:
        """Raises BadRequest for one that this life does not know."""
        found = self._purges.get(purge_id)
        if found is None:
            raise BadRequest(
                f"no purge {purge_id}: its report, if it ended, is in the state folder"
            )
        return found

    async def _wait_ended(self, tenant: str, fingerprint: bytes) -> None:
        for purge in list(self._purges.values()):
            if purge.concerns(tenant, fingerprint):
                await purge.ended.wait()

    # ------------------------------------------------------------------------------- beginning

    async def begin(self, tenant: str, fingerprints: Sequence[bytes], asked_by: str) -> Purge:
        """Of all of the tenant's namespaces, or with `tenant` "" of these. The one that is under
        way, where it is the same. `asked_by`: the tenant that may hear how it fares. Raises
        KVTierError; nothing was changed then."""
        if self._tasks is None:
            raise Draining("the daemon is shutting down: purge when it is up again")
        wanted = sorted(one.hex() for one in fingerprints)
        for purge in self._purges.values():
            same = purge.record.tenant == tenant and (tenant or purge.record.fingerprints == wanted)
            if same and not purge.ended.is_set():
                return purge
        if sum(not one.ended.is_set() for one in self._purges.values()) >= PURGES_MAX:
            raise BadRequest(f"{PURGES_MAX} purges are under way: ask again when one has ended")
        record = PurgeRecord(secrets.token_hex(8), tenant, wanted, wall_seconds(), asked_by)
        purge = self._purges[record.id] = Purge(record)  # From here on nobody opens them.
        try:
            await asyncio.to_thread(self._records.write, record)
        except KVTierError:
            del self._purges[record.id]
            purge.ended.set()
            raise
        if self._tasks is not None:  # Else the next life begins it.
            self._spawn(purge)
        return purge

    def _spawn(self, purge: Purge) -> None:
        assert self._tasks is not None, "a purge before the start"
        task = self._tasks.create_task(self._run(purge), name=f"purge {purge.record.id}")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _run(self, purge: Purge) -> None:
        record = purge.record
        async with self._turn:
            log.info(
                "purge begins",
                extra={
                    "purge": record.id,
                    "tenant": record.tenant,
                    "namespaces": len(record.fingerprints),
                    "begun": record.begun_count,
                },
            )
            try:
                await self._purge(purge)
            except KVTierError as error:  # The world's mistakes; our own end the daemon.
                record.not_done.append(f"{purge.progress.step}: {error}")
            self._release(purge)
            record.state = INCOMPLETE if record.not_done else DONE
            record.ended_at = wall_seconds()
            await self._write_report(purge)
        purge.ended.set()
        log.info(
            "purge ended",
            extra={
                "purge": record.id,
                "state": record.state,
                "bytes": purge.progress.done_bytes,
                "reason": "; ".join(record.not_done) or None,
            },
        )

    def _release(self, purge: Purge) -> None:
        for fingerprint in purge.record.spaces:
            opened = self._namespaces.with_fingerprint(fingerprint)
            self._core.post(EraseEnded(fingerprint, None if opened is None else opened.id))

    async def _write_report(self, purge: Purge) -> None:
        try:
            await asyncio.to_thread(self._records.write, purge.record)
            await asyncio.to_thread(self._records.forget_old)
        except (KVTierError, OSError) as error:  # The next life does it once more.
            log.warning("purge report not written", extra={"reason": str(error)})

    # ---------------------------------------------------------------------------------- its steps

    async def _purge(self, purge: Purge) -> None:
        record, progress = purge.record, purge.progress
        record.kept, record.not_done = list(BEYOND), []
        progress.begin("counting")
        if record.begun_count == 1:
            for fingerprint in record.spaces:
                await self._count(fingerprint, record)
            await asyncio.to_thread(self._records.write, record)
        progress.begin("voiding")
        for fingerprint in record.spaces:
            if self._remote is not None:
                await self._remote.begin(fingerprint)
            await self._namespaces.void(fingerprint)
            if self._nvme is not None:
                self._nvme.forget_chains(fingerprint)
            opened = self._namespaces.with_fingerprint(fingerprint)
            self._core.post(EraseBegun(fingerprint, None if opened is None else opened.id))
        await self._erase_tiers(record, progress)
        if self._remote is not None:
            progress.begin("remote")
            report = _report(record, TierName.REMOTE)
            for fingerprint in record.spaces:
                trouble = await self._remote.erase(fingerprint, report, progress)
                if trouble:
                    record.not_done.append(f"remote: {trouble}")
        progress.begin("books")
        for fingerprint in record.spaces:
            await self._forget(fingerprint, record)
        for name, forget in self._books.of_tenant:
            if record.tenant:
                forget(record.tenant)
                _note(record, name)
        progress.begin("report")

    async def _erase_tiers(self, record: PurgeRecord, progress: Progress) -> None:
        progress.begin("dram")
        for fingerprint in record.spaces:
            opened = self._namespaces.with_fingerprint(fingerprint)
            if opened is not None:
                report = _report(record, TierName.DRAM)
                await erase_memory(self._core, self._pool, opened, report, progress)
        await asyncio.to_thread(self._records.write, record)
        keepers: list[tuple[TierName, Erasable | None]] = [
            (TierName.CXL, self._cxl),
            (TierName.NVME, self._nvme),
        ]
        for tier, keeper in keepers:
            if keeper is not None:
                progress.begin(tier)
                report = _report(record, tier)
                trouble = await erase_lower(self._core, tier, keeper, report, progress)
                if trouble:
                    record.not_done.append(f"{tier}: {trouble}")
                await asyncio.to_thread(self._records.write, record)

    async def _count(self, fingerprint: bytes, record: PurgeRecord) -> None:
        """How many blocks each tier has of it now; a later life of the daemon would find none."""
        opened = self._namespaces.with_fingerprint(fingerprint)
        if opened is not None:
            for tier, count in (await self._counts(opened)).items():
                _add_blocks(record, tier, count)
        if self._nvme is not None:
            _add_blocks(record, TierName.NVME, self._nvme.block_count_of(fingerprint))

    async def _counts(self, opened: OpenedNamespace) -> dict[TierName, int]:
        found: dict[TierName, int] = {}
        row = 0
        while True:  # Ends: pages go on through the rows that there are.
            page = self._core.listing(opened.id, row)
            for tier, bit in TIER_BITS.items():
                found[tier] = found.get(tier, 0) + sum(1 for one in page.tiers if one & bit)
            row = page.row_next
            if not row:
                return found
            await asyncio.sleep(0)

    async def _forget(self, fingerprint: bytes, record: PurgeRecord) -> None:
        opened = self._namespaces.with_fingerprint(fingerprint)
        if opened is not None:
            for name, forget in self._books.of_namespace:
                forget(opened.id)
                _note(record, name)
            # Whoever has it open may offload again, and the next purge must find that.
            if OPEN not in record.kept:
                record.kept.append(OPEN)
            return
        try:
            await self._namespaces.forget_owner(fingerprint)
        except OSError as error:
            record.not_done.append(f"owners: {error.strerror}")


def _report(record: PurgeRecord, tier: TierName) -> TierReport:
    return record.tiers.setdefault(str(tier), TierReport())


def _add_blocks(record: PurgeRecord, tier: TierName, count: int) -> None:
    if count:
        report = _report(record, tier)
        report.blocks = (report.blocks or 0) + count


def _note(record: PurgeRecord, name: str) -> None:
    if name not in record.books:
        record.books.append(name)
