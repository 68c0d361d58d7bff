"""Batches of blocks on their way between the DRAM pool and the NVMe pool.

Invariant: the core hears of a batch once, when no call of it is under way any more; until then it
keeps both ends taken. Nobody gives a batch up: how many can hang behind a disk that stalls is the
core's to bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.core.events import Demoted, Promoted, TransferOutcome
from kvtier.core.instructions import Demote, Promote
from kvtier.io.driver import Batch, Outcome
from kvtier.layout import SlotLayout
from kvtier.pools.dram import DramPool
from kvtier.pools.nvme import NvmePool
from kvtier.server.base import Base
from kvtier.server.threads import call_soon
from kvtier.server.wear import WearMeter

_ENDS: Mapping[Outcome, TransferOutcome] = {
    Outcome.DONE: TransferOutcome.DONE,
    Outcome.CORRUPT: TransferOutcome.CORRUPT,
    Outcome.REFUSED: TransferOutcome.REFUSED,
    Outcome.TIMED_OUT: TransferOutcome.REFUSED,
}


@dataclass(frozen=True, slots=True)
class _Transfer:
    asked: Demote | Promote
    checksums: npt.NDArray[np.uint64]
    block_bytes: int  # On the disk.
    began_at: float

    @property
    def direction(self) -> str:
        return "demote" if isinstance(self.asked, Demote) else "promote"

    @property
    def count(self) -> int:
        return len(self.asked.slots)


class Transfers:
    """Lives on the event loop; batches return in the drivers' threads."""

    def __init__(self, base: Base, dram: DramPool, pool: NvmePool, wear: WearMeter) -> None:
        self._core = base.core
        self._namespaces = base.namespaces
        self._clock = base.clock
        self._metrics = base.metrics
        self._dram = dram
        self._pool = pool
        self._wear = wear
        self._loop = asyncio.get_running_loop()
        self._is_refusing = False
        self._is_over = False
        self._batch_count = 0
        self._returned = asyncio.Event()  # Set while no batch is under way.
        self._returned.set()
        self.block_counts = {"demote": 0, "promote": 0}  # Under way.

    def demote(self, asked: Demote) -> None:
        self._begin(asked, self._dram.checksums(asked.slots))

    def promote(self, asked: Promote) -> None:
        self._begin(asked, self._pool.checksums(asked.lower_slots))

    def refuse(self) -> None:
        """Begin nothing any more; what is asked for is answered REFUSED."""
        self._is_refusing = True

    def end(self) -> None:
        """Tell the core nothing any more: it does not run."""
        self._is_refusing = self._is_over = True

    async def wait_returned(self, seconds: float) -> bool:
        """Wait until nothing is under way, so long at most; whether that is so."""
        try:
            async with asyncio.timeout(seconds):
                await self._returned.wait()
        except TimeoutError:
            return False
        return True

    # --------------------------------------------------------------------------------- helpers

    def _begin(self, asked: Demote | Promote, checksums: npt.NDArray[np.uint64]) -> None:
        spec = self._namespaces.get(asked.namespace).spec
        block_bytes = SlotLayout(spec.shard_bytes, spec.shard_count).slot_bytes
        transfer = _Transfer(asked, checksums, block_bytes, self._clock.now())
        self._batch_count += 1
        self._returned.clear()
        self.block_counts[transfer.direction] += transfer.count
        if self._is_refusing:
            refused = Batch(transfer.count, on_returned=partial(self._on_returned, transfer))
            for member in range(transfer.count):
                refused.finish(member, Outcome.REFUSED)
            return
        views = [self._dram.padded_views(slot) for slot in asked.slots.tolist()]
        on_returned = partial(self._on_returned, transfer)
        if isinstance(asked, Demote):
            self._pool.write_blocks(asked.lower_slots, views, checksums, on_returned=on_returned)
        else:
            self._pool.read_blocks(asked.lower_slots, views, on_returned=on_returned)

    def _on_returned(self, transfer: _Transfer, batch: Batch) -> None:
        """In any thread, also in ours inside an instruction: the core is told in a later turn."""
        work = partial(self._end, transfer, batch)
        call_soon(self._loop, partial(self._core.spawn, work))

    def _end(self, transfer: _Transfer, batch: Batch) -> None:
        outcomes = np.array(
            [_ENDS.get(outcome, TransferOutcome.FAILED) for outcome in batch.outcomes], np.uint8
        )
        self._note(transfer, outcomes)
        self._batch_count -= 1
        if self._batch_count == 0:
            self._returned.set()
        if self._is_over:
            return
        asked = transfer.asked
        kind = Demoted if isinstance(asked, Demote) else Promoted
        self._core.post(
            kind(
                namespace=asked.namespace,
                slots=asked.slots,
                lower_slots=asked.lower_slots,
                outcomes=outcomes,
                checksums=transfer.checksums,
            )
        )

    def _note(self, transfer: _Transfer, outcomes: npt.NDArray[np.uint8]) -> None:
        metrics, direction, now = self._metrics, transfer.direction, self._clock.now()
        self.block_counts[direction] -= transfer.count
        counts = {one: int((outcomes == one).sum()) for one in TransferOutcome}
        for outcome, count in counts.items():
            metrics.transfers.transferred_blocks.labels(direction, outcome.name.lower()).inc(count)
        metrics.transfers.seconds[direction].observe(now - transfer.began_at)
        if direction == "promote":
            read_count = counts[TransferOutcome.DONE] + counts[TransferOutcome.CORRUPT]
            metrics.nvme.read_bytes.inc(read_count * transfer.block_bytes)
            return
        written_bytes = counts[TransferOutcome.DONE] * transfer.block_bytes
        metrics.nvme.written_bytes.labels("blocks").inc(written_bytes)
        # Not those that came up corrupt: a crash does that to blocks, and no engine is to blame.
        metrics.blocks.corrupt_blocks.inc(counts[TransferOutcome.CORRUPT])
        self._wear.note(written_bytes, now=now)
