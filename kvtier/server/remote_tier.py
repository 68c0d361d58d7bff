"""The shell's side of the remote tier: blocks put into an engine that other nodes use too, and got.

The core's book of it is what this daemon remembers to be there: its slots are only numbers, each
block is asked for by its hash. What an engine has lost is lost here when it is asked for; an engine
that is slow, gone or off costs a miss, and what it holds is remembered until it is back.

A namespace has an epoch among the nodes (`pools/remote/epochs.py`), besides the daemon's own one. A
clear changes both, the nodes' one last: while that could not be changed the tier is off for the
namespace, or blocks of before would be found again. Such a clear is *owed*: it is tried again and
again, also by the next life of the daemon (`owed_clears.py`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.core.events import Demoted, LowerOpened, Promoted, TransferOutcome
from kvtier.core.instructions import BindSegments, Demote, Promote, WriteLowerGone, WriteLowerReady
from kvtier.errors import Unavailable
from kvtier.layout import SEGMENT_BYTES
from kvtier.pools.dram import DramPool
from kvtier.pools.remote.blocks import Ending, RemoteBlocks, RemoteLayout
from kvtier.pools.remote.engine import RemoteOutcome
from kvtier.pools.remote.epochs import MEMBER_BYTES, EpochTimes, EpochWatch
from kvtier.pools.remote.frame import FrameFault
from kvtier.pools.remote.framing import BlockViews
from kvtier.pools.superblock import ROW_COUNT_MAX
from kvtier.server.base import Base
from kvtier.server.namespaces import OpenedNamespace
from kvtier.server.owed_clears import OwedClears
from kvtier.server.remote import RemoteParts, element_width
from kvtier.types import BlockHash, NamespaceId, TierName

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
# What is remembered is forgotten a segment at a time, and each namespace fills its own: many.
SEGMENTS_MIN = 64
_SEGMENT_BYTES_MIN = 1 << 20
# What is not there, or not what it should be, is forgotten; after all else it may be there still.
_GONE = {RemoteOutcome.ABSENT: TransferOutcome.FAILED}


@dataclass(slots=True)
class _Space:
    """One namespace in the remote engine."""

    namespace: OpenedNamespace
    blocks: RemoteBlocks
    epochs: EpochWatch
    # Clears are numbered. While the last one is not done among the nodes the tier is off.
    clear_begun: int = 0
    clear_done: int = 0
    is_paying: bool = False  # Somebody tries again and again.

    @property
    def is_clear_owed(self) -> bool:
        return self.clear_done < self.clear_begun

    def current_epoch(self) -> int | None:
        return None if self.is_clear_owed else self.epochs.current_epoch()


class RemoteKeeper:
    """Lives on the event loop."""

    def __init__(
        self,
        base: Base,
        dram: DramPool,
        parts: RemoteParts,
        *,
        known_bytes: int,
        owed: OwedClears,
        times: EpochTimes = EpochTimes(),
    ) -> None:
        """`known_bytes`: of blocks that are remembered to be there."""
        self._base = base
        self._owed = owed
        self._times = times
        # A file of `owed` is written or removed, and what it says changed here, by one at a time.
        self._owing = asyncio.Lock()
        self._dram = dram
        self._parts = parts
        share = max(known_bytes // SEGMENTS_MIN, _SEGMENT_BYTES_MIN)
        self._segment_bytes = min(share, SEGMENT_BYTES)
        self._segment_count = max(2, known_bytes // self._segment_bytes)
        self._member = secrets.token_bytes(MEMBER_BYTES)
        self._spaces: dict[NamespaceId, _Space] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._following: list[asyncio.Task[None]] = []
        self._moving: set[asyncio.Task[None]] = set()
        self._is_over = False
        self.block_counts = {"demote": 0, "promote": 0}  # Under way.
        base.namespaces.tell_opened(self._open)

    @property
    def name(self) -> str:
        """The engine's, without secrets."""
        return self._parts.engine.name

    @property
    def epoch_count(self) -> int:
        """Namespaces that the tier is on for."""
        return sum(space.current_epoch() is not None for space in self._spaces.values())

    @property
    def known_bytes_max(self) -> int:
        return self._segment_count * self._segment_bytes

    @property
    def parts(self) -> RemoteParts:
        return self._parts

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._parts.start()
        self._base.core.post(
            LowerOpened(
                segment_bytes=self._segment_bytes,
                segment_count=self._segment_count,
                row_count_max=ROW_COUNT_MAX,
                lane_count=1,
                sequence_first=1,
                tier=TierName.REMOTE,
            )
        )

    def _open(self, namespace: OpenedNamespace) -> None:
        """Follow its epoch from now on."""
        assert self._tasks is not None, "a namespace before the start"
        try:  # One look at a name: no thread, or the namespace would be in use meanwhile.
            is_owed = self._owed.is_owed(namespace.fingerprint)
        except OSError as error:
            log.warning("owed clears are unreadable", extra={"reason": error.strerror})
            is_owed = True
        parts, spec = self._parts, namespace.spec
        if namespace.slot_bytes * spec.shard_count > self._segment_bytes:
            log.warning(
                "blocks are too large for remote.known_bytes, the tier is off for their namespace",
                extra={"namespace": namespace.id, "bytes": namespace.payload_bytes},
            )
        epochs = self._watch(namespace.fingerprint)
        layout = RemoteLayout(
            namespace.fingerprint,
            spec.shard_count,
            namespace.payload_bytes,
            element_width(spec.kv_dtype),
            None if parts.make_sealer is None else parts.make_sealer(namespace.fingerprint),
        )
        space = _Space(namespace, None, epochs)  # type: ignore[arg-type]  # Each knows the other.
        space.blocks = RemoteBlocks(
            parts.engine,
            layout,
            space,
            chooser=parts.make_chooser(),
            threads=parts.threads,
            clock=self._base.clock,
            buffers=parts.buffers,
        )
        self._spaces[namespace.id] = space
        name = f"remote epoch {namespace.id}"
        self._following.append(self._tasks.create_task(epochs.follow(), name=name))
        if is_owed:
            space.clear_begun = 1
            log.warning(
                "remote clear is owed from an earlier life, the tier is off for its namespace",
                extra={"namespace": namespace.id, "engine": self.name},
            )
            self._pay(space)

    # ----------------------------------------------------------------------------- instructions

    def on_bind_segments(self, bound: BindSegments) -> None:
        """Slots are numbers of the core's."""

    def on_write_ready(self, written: WriteLowerReady) -> None:
        """Blocks are asked for by their hashes."""

    def on_write_gone(self, written: WriteLowerGone) -> None:
        """What the daemon forgets others may use; the engine has its own rules for what goes."""

    def on_demote(self, asked: Demote) -> None:
        checksums = self._dram.checksums(asked.slots)
        blocks = [
            BlockViews(block, self._dram.views(slot), int(checksum))
            for block, slot, checksum in zip(
                asked.hashes, asked.slots.tolist(), checksums.tolist(), strict=True
            )
        ]
        self._spawn("demote", len(blocks), self._demote(asked, blocks, checksums))

    def on_promote(self, asked: Promote) -> None:
        blocks = [
            BlockViews(block, self._dram.views(slot))
            for block, slot in zip(asked.hashes, asked.slots.tolist(), strict=True)
        ]
        self._spawn("promote", len(blocks), self._promote(asked, blocks))

    async def _demote(
        self, asked: Demote, blocks: Sequence[BlockViews], checksums: npt.NDArray[np.uint64]
    ) -> None:
        space = self._spaces[asked.namespace]
        with self._base.metrics.remote.transfer_seconds["demote"].time():
            endings = await space.blocks.put(blocks, timeout_seconds=self._parts.timeout_seconds)
        outcomes = _outcomes(endings, {FrameFault.CHECKSUM: TransferOutcome.CORRUPT})
        self._base.metrics.blocks.corrupt_blocks.inc(
            int((outcomes == TransferOutcome.CORRUPT).sum())
        )
        self._end(asked, "demote", outcomes, checksums)

    async def _promote(self, asked: Promote, blocks: Sequence[BlockViews]) -> None:
        space = self._spaces[asked.namespace]
        with self._base.metrics.remote.transfer_seconds["promote"].time():
            got = await space.blocks.get(blocks, timeout_seconds=self._parts.timeout_seconds)
        faults = dict.fromkeys(FrameFault, TransferOutcome.CORRUPT)
        outcomes = _outcomes(got.endings, _GONE | faults)
        self._end(asked, "promote", outcomes, np.array(got.checksums, np.uint64))

    def _end(
        self,
        asked: Demote | Promote,
        direction: str,
        outcomes: npt.NDArray[np.uint8],
        checksums: npt.NDArray[np.uint64],
    ) -> None:
        for outcome in TransferOutcome:
            count = int((outcomes == outcome).sum())
            labels = (direction, outcome.name.lower())
            self._base.metrics.remote.transferred_blocks.labels(*labels).inc(count)
        if self._is_over:
            return
        kind = Demoted if isinstance(asked, Demote) else Promoted
        self._base.core.post(
            kind(
                namespace=asked.namespace,
                slots=asked.slots,
                lower_slots=asked.lower_slots,
                outcomes=outcomes,
                checksums=checksums,
                tier=TierName.REMOTE,
            )
        )

    # ----------------------------------------------------------------------------- other nodes

    async def exists_count(self, namespace: NamespaceId, hashes: Sequence[BlockHash]) -> int | None:
        """How many leading blocks have a value in the engine; None when it does not tell."""
        space = self._spaces.get(namespace)
        if space is None:
            return None
        outcomes = await space.blocks.exists(hashes, timeout_seconds=self._parts.timeout_seconds)
        for count, outcome in enumerate(outcomes):
            if outcome is not RemoteOutcome.DONE:
                return count if count or outcome is RemoteOutcome.ABSENT else None
        return len(outcomes)

    async def begin_clear(self, namespace: NamespaceId) -> int:
        """Before the core forgets: nothing of the namespace is found or got from now on, also not
        by a next life of the daemon. The number of this clear.

        Raises KVTierError when that cannot be recorded; nothing was changed then.
        """
        space = self._spaces[namespace]
        async with self._owing:
            await asyncio.to_thread(self._owed.note, space.namespace.fingerprint)
            space.clear_begun += 1
            return space.clear_begun

    async def end_clear(self, namespace: NamespaceId, number: int) -> None:
        """Tell the other nodes; when this returns none of them uses what was there before.

        Raises Unavailable when that could not be done; then the tier is off for it here until it
        could. Not to be cancelled.
        """
        space = self._spaces[namespace]
        outcome = await self._clear(space, number)
        if outcome is not RemoteOutcome.DONE:
            self._pay(space)
            raise Unavailable(
                f"cleared on this node, but {self.name} could not be told ({outcome}): other nodes "
                "still use what is there, and this one nothing of it until it could be told, which "
                "is tried again and again"
            )

    def epoch_of(self, namespace: NamespaceId) -> int | None:
        """Its epoch among the nodes; None while the tier is off for it."""
        return self._spaces[namespace].current_epoch()

    async def clear_closed(self, fingerprint: bytes) -> int:
        """As a clear, of a namespace that nobody has opened here; its new epoch. Raises Unavailable
        when the other nodes could not be told."""
        await asyncio.to_thread(self._owed.note, fingerprint)
        epochs = self._watch(fingerprint)
        cleared = await epochs.clear()
        if cleared.outcome is not RemoteOutcome.DONE:
            raise Unavailable(f"{self.name} could not be told ({cleared.outcome})")
        await epochs.leave()
        async with self._owing:
            await asyncio.to_thread(self._owed.forget, fingerprint)
        return cleared.epoch

    def _watch(self, fingerprint: bytes) -> EpochWatch:
        return EpochWatch(
            self._parts.engine,
            fingerprint,
            self._member,
            clock=self._base.clock,
            draw=secrets.randbits,
            times=self._times,
        )

    async def _clear(self, space: _Space, number: int) -> RemoteOutcome:
        cleared = await space.epochs.clear()
        if cleared.outcome is RemoteOutcome.DONE:
            space.clear_done = max(space.clear_done, number)
            async with self._owing:
                if not space.is_clear_owed:  # Else another one has begun.
                    await self._forget_owed(space)
        return cleared.outcome

    async def _forget_owed(self, space: _Space) -> None:
        try:
            await asyncio.to_thread(self._owed.forget, space.namespace.fingerprint)
        except OSError as error:  # The next life clears once more.
            log.warning("owed clear cannot be forgotten", extra={"reason": error.strerror})

    def _pay(self, space: _Space) -> None:
        """Have the clear that is owed done, beside all else."""
        if space.is_paying or self._is_over:
            return
        assert self._tasks is not None, "the remote tier was not started"
        space.is_paying = True
        name = f"remote clear {space.namespace.id}"
        self._following.append(self._tasks.create_task(self._pay_owed(space), name=name))

    async def _pay_owed(self, space: _Space) -> None:
        try:
            while space.is_clear_owed:
                if await self._clear(space, space.clear_begun) is not RemoteOutcome.DONE:
                    await asyncio.sleep(self._times.refresh_seconds)
        finally:
            space.is_paying = False
        extra = {"namespace": space.namespace.id, "engine": self.name}
        log.info("remote clear that was owed is done", extra=extra)

    # ------------------------------------------------------------------------------------- end

    async def stop(self) -> None:
        """The orderly end: what is under way ends, at its deadline at the latest."""
        self._is_over = True
        for task in self._following:
            task.cancel()
        if self._moving:
            await asyncio.wait(self._moving, timeout=CLOSE_SECONDS)
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                for space in self._spaces.values():
                    await space.epochs.leave()
        except TimeoutError:
            log.warning("remote engine is told nothing of our end", extra={"engine": self.name})

    async def close(self) -> bool:
        """Whether nobody of ours touches memory any more; until then it must stay where it is."""
        self._is_over = True
        moving = list(self._moving)
        for task in (*self._following, *moving):
            task.cancel()
        if moving:  # Cancelled, they still wait for threads that read or write slots.
            await asyncio.wait(moving, timeout=CLOSE_SECONDS)
        await self._parts.close()
        return all(task.done() for task in moving)

    # --------------------------------------------------------------------------------- helpers

    def _spawn(self, direction: str, count: int, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None, "the remote tier was not started"
        self.block_counts[direction] += count
        task = self._tasks.create_task(work)
        self._moving.add(task)

        def on_done(done: asyncio.Task[None]) -> None:
            self.block_counts[direction] -= count
            self._moving.discard(done)

        task.add_done_callback(on_done)


def _outcomes(
    endings: Sequence[Ending], known: dict[Any, TransferOutcome]
) -> npt.NDArray[np.uint8]:
    """REFUSED for all that says nothing of the block."""
    return np.array(
        [
            TransferOutcome.DONE
            if ending is RemoteOutcome.DONE
            else known.get(ending, TransferOutcome.REFUSED)
            for ending in endings
        ],
        np.uint8,
    )
