"""Blocks by value: Put and Get for tools, other hosts and whoever cannot map slabs; and Watch.

Put and Get hold slots as the daemon's own session. Every bracket ends its hold whatever happens: a
copy that began is finished first (mover.py), then the slot is aborted or the lease released.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import DAEMON_SESSION
from kvtier.errors import BadRequest, CorruptReplica, LimitExceeded, Unavailable
from kvtier.io.copy import PIECE_BYTES_MAX
from kvtier.server.base import Base
from kvtier.server.calls import Handlers, Send
from kvtier.server.leasing import GET_WAIT_SECONDS, Leasing
from kvtier.server.mover import Mover
from kvtier.server.namespaces import OpenedNamespace
from kvtier.server.security import Caller
from kvtier.server.watch import WatchHub
from kvtier.server.wire import check_packed
from kvtier.types import BlockHash, CommitOutcome, PackedHashes
from kvtier.v1 import kvtier_pb2 as pb

log = logging.getLogger(__name__)

# Pieces gathered for one hop to a thread and back.
WRITE_BYTES_MAX = 1 << 20
# Blocks leased at once by Get: little for a client that does not read to hold.
GET_WINDOW_BLOCKS = 64
# A client that stalls in the middle of a block, or trickles it, loses its slot; one that does not
# read loses its lease. There are few of these calls for all.
PIECE_SECONDS_MAX = 10.0
PUT_BYTES_A_SECOND_MIN = 1 << 20
# While the pool is being populated a slot may come soon.
SLOT_SECONDS_MAX = 5.0
_SLOT_RETRY_SECONDS = 0.05


@dataclass(slots=True)
class _Put:
    """One Put call: the block that is arriving, and what became of those before."""

    namespace: OpenedNamespace
    parent: BlockHash | None
    hash: BlockHash | None = None
    slot: int | None = None  # None for a block that found no room: its bytes are skipped.
    epoch: int = 0
    received_bytes: int = 0
    due_at: float = 0.0  # When the block that is arriving must be whole.
    waiting: list[tuple[int, bytes]] = field(default_factory=list)
    waiting_bytes: int = 0
    outcomes: bytearray = field(default_factory=bytearray)
    no_room_count: int = 0


class DataCalls:
    """Each method is one RPC; who may call it was checked before (calls.py)."""

    def __init__(
        self,
        base: Base,
        mover: Mover,
        watch: WatchHub,
        leasing: Leasing,
        *,
        puts_max: int,
        lease_seconds_max: float,
    ) -> None:
        self._core = base.core
        self._namespaces = base.namespaces
        self._mover = mover
        self._watch = watch
        self._leasing = leasing
        self._clock = base.clock
        self._metrics = base.metrics
        self._missed = base.missed
        self.puts_max = puts_max
        self._active: dict[str, int] = {}  # By tenant.
        self._lease_seconds_max = lease_seconds_max

    @property
    def active_count(self) -> int:
        return sum(self._active.values())

    def add_to(self, handlers: Handlers) -> None:
        handlers.collecting["Put"] = self.put
        handlers.streaming |= {"Get": self.get, "Watch": self.watch}

    # ------------------------------------------------------------------------------------- put

    async def put(
        self, first: pb.PutRequest, caller: Caller, rest: AsyncIterator[pb.PutRequest]
    ) -> pb.PutResponse:
        namespace = self._namespaces.get_for(first.namespace_id, caller.tenant)
        size = namespace.spec.hash_bytes
        if len(first.parent) not in (0, size):
            raise BadRequest(f"parent has {len(first.parent)} bytes: a hash here has {size}")
        put = _Put(namespace, BlockHash(first.parent) if first.parent else None)
        with self._one_of_puts(caller.tenant):
            try:
                await self._take_piece(put, first)
                while (
                    piece := await _next_piece(rest, _patience(put, self._clock.now()))
                ) is not None:
                    await self._take_piece(put, piece)
                if put.hash is not None:
                    raise BadRequest(
                        f"the stream ended inside a block: {put.received_bytes} of "
                        f"{namespace.payload_bytes} bytes"
                    )
            finally:
                self._abort_open(put)
        outcomes = put.outcomes
        ready_count = outcomes.count(CommitOutcome.READY)
        present_count = outcomes.count(CommitOutcome.PRESENT)
        return pb.PutResponse(
            ready_count=ready_count,
            present_count=present_count,
            refused_count=len(outcomes) + put.no_room_count - ready_count - present_count,
        )

    async def _take_piece(self, put: _Put, piece: pb.PutRequest) -> None:
        self._check_piece(put, piece)
        if put.hash is None:
            put.hash = BlockHash(piece.hash)
            await self._reserve_one(put)
            seconds = put.namespace.payload_bytes / PUT_BYTES_A_SECOND_MIN
            put.due_at = self._clock.now() + PIECE_SECONDS_MAX + seconds
        data = piece.data
        if put.slot is not None:
            put.waiting.append((put.received_bytes, data))
            put.waiting_bytes += len(data)
        put.received_bytes += len(data)
        is_whole = put.received_bytes == put.namespace.payload_bytes
        if put.slot is not None and (is_whole or put.waiting_bytes >= WRITE_BYTES_MAX):
            waiting, put.waiting, put.waiting_bytes = put.waiting, [], 0
            await self._mover.write(put.slot, waiting)
            self._metrics.blocks.by_value_bytes.labels("put").inc(
                sum(len(one[1]) for one in waiting)
            )
        if is_whole:
            await self._commit_one(put)

    def _check_piece(self, put: _Put, piece: pb.PutRequest) -> None:
        size = put.namespace.spec.hash_bytes
        if len(piece.hash) != size:
            raise BadRequest(f"hash has {len(piece.hash)} bytes: a hash here has {size}")
        if put.hash is not None and piece.hash != put.hash:
            raise BadRequest("a block began before the one ahead of it was whole")
        if piece.offset != put.received_bytes:
            raise BadRequest(f"offset is {piece.offset}: the next byte is {put.received_bytes}")
        count = len(piece.data)
        if not 1 <= count <= PIECE_BYTES_MAX:
            raise BadRequest(f"data has {count} bytes: send 1 to {PIECE_BYTES_MAX}")
        if put.received_bytes + count > put.namespace.payload_bytes:
            raise BadRequest(
                f"a block here has {put.namespace.payload_bytes} bytes: this piece ends beyond"
            )

    async def _reserve_one(self, put: _Put) -> None:
        """A slot for the block that begins, or none if there is no room."""
        # One that waited in vain is enough: a put into a full pool must not take minutes.
        deadline = self._clock.now() + (0.0 if put.no_room_count else SLOT_SECONDS_MAX)
        while True:  # Ends at the deadline.
            reply = await self._core.run(
                ev.Reserve(DAEMON_SESSION, put.namespace.id, 1),
                if_abandoned=lambda lost: self._abort_unseen(put, lost),
            )
            assert isinstance(reply, ins.SlotsReserved), "Reserve has one kind of reply"
            if len(reply.slots):
                put.slot, put.epoch = int(reply.slots[0]), reply.epoch
                self._metrics.blocks.reserved_slots.inc()
                return
            if self._clock.now() >= deadline:
                put.no_room_count += 1
                return
            await asyncio.sleep(_SLOT_RETRY_SECONDS)

    async def _commit_one(self, put: _Put) -> None:
        assert put.hash is not None, "a block without hash is whole"
        block, slot = put.hash, put.slot
        put.hash, put.slot, put.received_bytes = None, None, 0
        if slot is not None:
            # One block is one slice: nothing can come between taking the slot and committing it.
            reply = await self._core.run(
                ev.Commit(
                    session=DAEMON_SESSION,
                    namespace=put.namespace.id,
                    hashes=[block],
                    slots=np.array([slot], np.uint32),
                    parent=put.parent,
                    epoch=put.epoch,
                )
            )
            assert isinstance(reply, ins.Committed), "Commit has one kind of reply"
            put.outcomes += reply.outcomes
            self._metrics.blocks.note_outcomes(reply.outcomes)
        put.parent = block

    def _abort_open(self, put: _Put) -> None:
        if put.slot is not None:
            slot, put.slot = put.slot, None
            self._abort(put.namespace, np.array([slot], np.uint32))

    def _abort_unseen(self, put: _Put, reply: ins.Reply | None) -> None:
        assert isinstance(reply, ins.SlotsReserved), "Reserve has one kind of reply"
        if len(reply.slots):
            self._abort(put.namespace, reply.slots)

    def _abort(self, namespace: OpenedNamespace, slots: ev.Slots) -> None:
        self._core.post(ev.Abort(DAEMON_SESSION, namespace.id, slots))
        self._metrics.blocks.aborted_slots.inc(len(slots))

    # ------------------------------------------------------------------------------------- get

    async def get(self, request: pb.GetRequest, caller: Caller, send: Send) -> None:
        """Blocks from the first one to the first gap, a window of leased blocks at a time."""
        namespace = self._namespaces.get_for(request.namespace_id, caller.tenant)
        size = namespace.spec.hash_bytes
        count = check_packed(request.hashes, size)
        matched = self._core.match_packed(namespace.id, request.hashes)
        packed = PackedHashes(request.hashes, size)
        reason = self._missed.of_match(namespace.id, packed, matched)
        self._metrics.blocks.asked.note(namespace.id, "get", count, matched.tiers, reason)
        wait_until = self._clock.now() + GET_WAIT_SECONDS
        with self._one_of_puts(caller.tenant):
            for start in range(0, count, GET_WINDOW_BLOCKS):
                stop = min(start + GET_WINDOW_BLOCKS, count)
                hashes = PackedHashes(request.hashes[: stop * size], size)
                if not await self._send_window(namespace, hashes, start, wait_until, send):
                    return

    async def _send_window(
        self,
        namespace: OpenedNamespace,
        hashes: PackedHashes,
        start: int,
        wait_until: float,
        send: Send,
    ) -> bool:
        """Send the blocks from `start` on; False at the first gap."""
        deadline = self._clock.now() + self._lease_seconds_max
        reply = await self._leasing.acquire(
            ev.Acquire(
                session=DAEMON_SESSION,
                namespace=namespace.id,
                hashes=hashes,
                deadline=deadline,
                skip_count=start,
                wait_until=min(wait_until, deadline),
            )
        )
        if reply is None:
            return False
        try:
            for place, slot in enumerate(reply.slots.tolist()):
                try:
                    pieces, checksum = await self._mover.read(slot)
                except CorruptReplica as error:
                    log.error("block corrupt in memory, dropped", extra={"reason": str(error)})
                    self._metrics.blocks.corrupt_blocks.inc()
                    self._core.post(
                        ev.SlotsCorrupt(namespace.id, np.array([slot], dtype=np.uint32))
                    )
                    return False
                if self._clock.now() >= deadline:
                    raise Unavailable("the client read too slowly: its lease is over, ask again")
                offset = 0
                for piece in pieces:
                    answer = pb.GetResponse(
                        index=start + place, offset=offset, data=piece, checksum=checksum
                    )
                    await _send_in_time(send, answer)
                    offset += len(piece)
                self._metrics.blocks.by_value_bytes.labels("get").inc(offset)
        finally:
            self._leasing.release(DAEMON_SESSION, reply)
        return reply.leased_count == len(hashes)

    # ----------------------------------------------------------------------------------- watch

    async def watch(self, request: pb.WatchRequest, caller: Caller, send: Send) -> None:
        """Until the client ends the call."""
        namespace = self._namespaces.get_for(request.namespace_id, caller.tenant)
        with self._watch.watching(namespace.id, caller.tenant) as watcher:
            while True:
                await send(await watcher.next_event())

    # --------------------------------------------------------------------------------- helpers

    @contextmanager
    def _one_of_puts(self, tenant: str) -> Iterator[None]:
        if self._active.get(tenant, 0) >= self.puts_max:
            raise LimitExceeded(
                f"{self.puts_max} Put and Get calls are under way (server.puts_max)"
            )
        self._active[tenant] = self._active.get(tenant, 0) + 1
        try:
            yield
        finally:
            self._active[tenant] -= 1


def _patience(put: _Put, now: float) -> float:
    """How many seconds the next piece may take."""
    return PIECE_SECONDS_MAX if put.hash is None else min(PIECE_SECONDS_MAX, put.due_at - now)


async def _next_piece(pieces: AsyncIterator[pb.PutRequest], seconds: float) -> pb.PutRequest | None:
    try:
        async with asyncio.timeout(seconds):
            return await anext(pieces, None)
    except TimeoutError:
        raise Unavailable("the pieces of the block came too slowly") from None


async def _send_in_time(send: Send, answer: pb.GetResponse) -> None:
    try:
        async with asyncio.timeout(PIECE_SECONDS_MAX):
            await send(answer)
    except TimeoutError:
        raise Unavailable(f"the client read nothing for {PIECE_SECONDS_MAX:g} s") from None
