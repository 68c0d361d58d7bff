"""The shell's side of the DRAM tier: slabs populated in threads, bound, offered and dropped.

Runs the instructions about slabs and slot-table entries; everything that touches memory for longer
than a moment happens in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvtier.core.events import SlabPopulated
from kvtier.core.instructions import (
    BindSlabs,
    DropSlabs,
    OfferSlab,
    WithdrawSlab,
    WriteChecksums,
    WriteGone,
    WriteReady,
    WriteReserved,
)
from kvtier.pools.dram import DramPool
from kvtier.pools.pool import SlabBinding
from kvtier.pools.slabs import Slab
from kvtier.pools.source import SlabSource
from kvtier.pools.stock import Outcome, PopulateRefused, SlabStock
from kvtier.server.base import Base
from kvtier.server.inventory import ParkedSet, ParkedSlab
from kvtier.server.keeping import Keeper
from kvtier.server.sessions import Sessions
from kvtier.types import SlabId
from kvtier.v1 import kvtier_pb2 as pb

log = logging.getLogger(__name__)

# Memory that was refused may be free later, such as when a neighbour ends.
RETRY_SECONDS = 30.0


class SlabKeeper:
    """Owns the stock's threads; the pool belongs to the event loop."""

    def __init__(
        self,
        base: Base,
        pool: DramPool,
        sessions: Sessions,
        *,
        slab_bytes: int,
        slab_count_max: int,
        populate_threads: int,
        source: SlabSource | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        """`keeper`: with whom slabs are left that somebody may be offered."""
        self._pool = pool
        self._keeper = Keeper() if keeper is None else keeper
        self._core = base.core
        self._namespaces = base.namespaces
        self._sessions = sessions
        self._bindings: dict[SlabId, BindSlabs] = {}
        self._slab_bytes = slab_bytes
        self._slab_count_max = slab_count_max
        self._tasks: asyncio.TaskGroup | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._populated_count = 0
        self.huge_bytes = 0
        self._stock = SlabStock(
            slab_bytes=slab_bytes,
            slab_count_max=slab_count_max,
            on_outcome=self._from_thread,
            clock=base.clock,
            parallel=populate_threads,
            source=source,
        )

    @property
    def slab_bytes(self) -> int:
        return self._slab_bytes

    @property
    def budget_bytes(self) -> int:
        return self._slab_bytes * self._slab_count_max

    @property
    def populated_bytes(self) -> int:
        return self._slab_bytes * self._populated_count

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to populate; returns at once."""
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._stock.request(self._slab_count_max - self._stock.slab_count)

    def stop(self) -> None:
        """Wait for the threads: at most one step of populating each."""
        if self._retry is not None:
            self._retry.cancel()
        self._stock.stop()

    # -------------------------------------------------------------------------------- adopting

    def skip_slabs(self, slab_next: int) -> None:
        """Before `start`: lower numbers are those of the life before."""
        self._stock.skip_ids(slab_next)

    @property
    def room_count(self) -> int:
        """Slabs that the budget still allows."""
        return self._slab_count_max - self._stock.slab_count

    def adopt(self, slab: Slab) -> None:
        """Before `start`: a slab that the life before has populated; it is bound next."""
        assert slab.length_bytes == self._slab_bytes, "a slab of another size"
        self._stock.adopt(slab)
        self._pool.add_slab(slab)
        self._populated_count += 1
        self.huge_bytes += slab.huge_bytes

    # ------------------------------------------------------------------------------ populating

    def _from_thread(self, outcome: Outcome) -> None:
        assert self._loop is not None, "a slab before the start"
        work: Callable[[], None] = lambda: self._on_outcome(outcome)  # noqa: E731
        self._loop.call_soon_threadsafe(self._core.spawn, work)

    def _on_outcome(self, outcome: Outcome) -> None:
        if isinstance(outcome, PopulateRefused):
            log.warning(
                "slab refused, the pool is smaller for now", extra={"reason": outcome.reason}
            )
            self._retry_later()
            return
        if self._populated_count == 0:
            log.info(
                "first slab populated",
                extra={"pages": outcome.page_kind, "source": self._stock.source.name},
            )
        self._pool.add_slab(outcome)
        self._populated_count += 1
        self.huge_bytes += outcome.huge_bytes
        if self._populated_count == self._slab_count_max:
            log.info(
                "pool populated",
                extra={"bytes": self.populated_bytes, "huge_bytes": self.huge_bytes},
            )
        self._core.post(SlabPopulated(outcome.id, outcome.node))

    def _retry_later(self) -> None:
        assert self._loop is not None, "a slab before the start"
        if self._retry is None:
            self._retry = self._loop.call_later(RETRY_SECONDS, self._request_missing)

    def _request_missing(self) -> None:
        self._retry = None
        self._stock.request(self._slab_count_max - self._stock.slab_count)

    # ----------------------------------------------------------------------------- instructions

    def on_bind(self, bound: BindSlabs) -> None:
        namespace = self._namespaces.get(bound.namespace)
        self._pool.bind(
            SlabBinding(
                slab_set=bound.slab_set,
                slabs=bound.slabs,
                fingerprint=namespace.fingerprint,
                slot_first=bound.slot_first,
                slot_count=bound.slot_count,
                slot_bytes=namespace.slot_bytes,
                shard_bytes=namespace.spec.shard_bytes,
            )
        )
        for slab in bound.slabs:
            self._bindings[slab] = bound
        self._keeper.keep_set(
            ParkedSet(
                namespace.fingerprint.hex(),
                tuple(_parked(self._pool.slab(slab)) for slab in bound.slabs),
                bound.slot_first,
                bound.slot_count,
                namespace.slot_bytes,
                namespace.spec.shard_bytes,
            ),
            [self._pool.slab_fd(slab) for slab in bound.slabs],
        )

    def on_offer(self, offer: OfferSlab) -> None:
        record = self._sessions.get(offer.session)
        if record is None or not record.is_live:
            return
        bound = self._bindings[offer.slab]
        slab = self._pool.slab(offer.slab)
        record.offered.add(offer.slab)
        offered = pb.SlabOffered(
            namespace_id=bound.namespace,
            shard=offer.shard,
            slab_id=offer.slab,
            slot_first=bound.slot_first,
            slot_count=bound.slot_count,
            slot_bytes=self._namespaces.get(bound.namespace).slot_bytes,
            slab_bytes=slab.length_bytes,
            page_kind=slab.page_kind,
        )
        self._sessions.send(offer.session, pb.DaemonFrame(slab_offered=offered), slab.fd)

    def on_withdraw(self, withdrawn: WithdrawSlab) -> None:
        frame = pb.SlabWithdrawn(
            namespace_id=self._bindings[withdrawn.slab].namespace,
            shard=withdrawn.shard,
            slab_id=withdrawn.slab,
        )
        self._sessions.send(withdrawn.session, pb.DaemonFrame(slab_withdrawn=frame))

    def on_drop(self, dropped: DropSlabs) -> None:
        """Nobody holds these slabs any more: punch them and have fresh ones populated."""
        assert self._tasks is not None, "a slab before the start"
        self._keeper.drop_set(self._bindings[dropped.slabs[0]].slot_first)
        for slab in dropped.slabs:
            del self._bindings[slab]
        self._tasks.create_task(self._replace(self._pool.drop(dropped.slab_set)))

    async def _replace(self, slabs: list[Slab]) -> None:
        self._populated_count -= len(slabs)
        self.huge_bytes -= sum(slab.huge_bytes for slab in slabs)
        for slab in slabs:
            await asyncio.to_thread(self._stock.give_back, slab)
        self._stock.request(len(slabs))

    def on_write_reserved(self, written: WriteReserved) -> None:
        self._pool.write_reserved(written.slots, written.engine)

    def on_write_ready(self, written: WriteReady) -> None:
        self._pool.write_ready(
            written.slots,
            written.hashes,
            written.parents,
            epoch=written.epoch,
            sequence=written.sequence,
        )

    def on_write_checksums(self, written: WriteChecksums) -> None:
        self._pool.write_checksums(written.slots, written.checksums)

    def on_write_gone(self, written: WriteGone) -> None:
        self._pool.write_gone(written.slots)


def _parked(slab: Slab) -> ParkedSlab:
    return ParkedSlab(
        f"slab-{slab.id}", slab.id, str(slab.page_kind), huge_bytes=slab.huge_bytes, node=slab.node
    )
