"""The shell's side of the CXL tier: memory populated in threads, blocks copied to it and back.

It is opened once all of its memory is there, and gone with the daemon. Blocks reach engines through
DRAM, or engines that have mapped the tier copy them from there (segment_offers.py). A copy between
two memories can neither fail nor hang as a disk can. A block's checksum goes with it both ways and
is compared where the block leaves memory, as for what never left DRAM (decision 0013).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.core.events import Demoted, LowerOpened, Promoted, TransferOutcome
from kvtier.core.instructions import (
    BindSegments,
    Demote,
    Promote,
    RemainsHeld,
    WriteLowerGone,
    WriteLowerReady,
)
from kvtier.io.zero import zero_all
from kvtier.memory import Bytes
from kvtier.pools.cxl import (
    CopyBatch,
    CxlMemory,
    MeasuredSpeed,
    measure_speed,
)
from kvtier.pools.cxl_slots import CxlSlots
from kvtier.pools.dram import DramPool
from kvtier.pools.slabs import Slab
from kvtier.pools.stock import Outcome, PopulateRefused, SlabStock
from kvtier.server.base import Base
from kvtier.server.segment_offers import Offers
from kvtier.server.threads import call_soon
from kvtier.types import TierName

log = logging.getLogger(__name__)

# Copies of one thread reach the bandwidth of most CXL devices; two keep both ways busy.
COPY_THREADS = 2
# A slab may be refused because engines still map what the daemon before lent them: they give it up
# as soon as they see that it is gone.
ASK_AGAIN_SECONDS = 2.0
ASK_AGAIN_COUNT = 3
_DONE, _CORRUPT = np.uint8(TransferOutcome.DONE), np.uint8(TransferOutcome.CORRUPT)
_Checksums = npt.NDArray[np.uint64]
_Outcomes = npt.NDArray[np.uint8]


class CxlKeeper:
    """Lives on the event loop; populating and copying happen in threads of its own."""

    def __init__(self, base: Base, dram: DramPool, memory: CxlMemory, offers: Offers) -> None:
        self._base = base
        self._dram = dram
        self._memory = memory
        self._offers = offers
        self.is_direct = False  # Engines copy from it themselves.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slabs: list[Slab] = []
        self._missing_count = memory.slab_count_max  # Neither populated nor refused yet.
        self._ask_again_count = ASK_AGAIN_COUNT
        self._slots: CxlSlots | None = None
        self._is_measuring = False
        self._is_over = False
        self.block_counts = {"demote": 0, "promote": 0}  # Under way.
        self._threads = ThreadPoolExecutor(COPY_THREADS, "kvtier-cxl")
        self._stock = SlabStock(
            slab_bytes=memory.slab_bytes,
            slab_count_max=memory.slab_count_max,
            on_outcome=self._from_thread,
            clock=base.clock,
            reserve_bytes=memory.reserve_bytes,
            source=memory.source,
        )

    @property
    def label(self) -> str:
        """What the memory is; begins with "emulated" where that is so."""
        return self._memory.label

    @property
    def state(self) -> str:
        """One of metrics.CXL_STATES."""
        if self._missing_count or self._is_measuring:
            return "populating"
        return "off" if self._slots is None else "on"

    @property
    def is_emulated(self) -> bool:
        return self._memory.throttle_stats() is not None

    @property
    def budget_bytes(self) -> int:
        return self._memory.slab_bytes * self._memory.slab_count_max

    @property
    def populated_bytes(self) -> int:
        return self._memory.slab_bytes * len(self._slabs)

    # ------------------------------------------------------------------------------ populating

    def start(self) -> None:
        """Begin to populate; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._stock.request(self._memory.slab_count_max)

    def _from_thread(self, outcome: Outcome) -> None:
        self._in_loop(partial(self._on_outcome, outcome))

    def _on_outcome(self, outcome: Outcome) -> None:
        self._missing_count -= 1
        if isinstance(outcome, PopulateRefused):
            log.warning("cxl slab refused", extra={"reason": outcome.reason})
        else:
            self._slabs.append(outcome)
        if self._missing_count or self._is_over:
            return
        refused_count = self._memory.slab_count_max - len(self._slabs)
        if refused_count and self._ask_again_count:
            assert self._loop is not None, "the cxl tier was not started"
            self._ask_again_count -= 1
            self._missing_count = refused_count
            self._loop.call_later(ASK_AGAIN_SECONDS, self._ask_again, refused_count)
            return
        if not self._slabs:
            log.error("the cxl tier is off: it has no memory", extra={"memory": self.label})
            return
        self._is_measuring = True
        self._threads.submit(self._measure, self._slabs[0])

    def _ask_again(self, count: int) -> None:
        if not self._is_over:
            self._stock.request(count)

    def _measure(self, slab: Slab) -> None:
        """In a thread, before anything lies in the slab."""
        try:
            speed = measure_speed(self._memory, slab, self._base.clock)
        except BaseException as error:  # noqa: BLE001  # A mistake of ours ends the daemon.
            self._in_loop(partial(self._base.core.fail, error))
            return
        self._in_loop(partial(self._on_measured, speed))

    def _on_measured(self, speed: MeasuredSpeed) -> None:
        self._is_measuring = False
        if self._is_over:
            return
        self._slots = CxlSlots(self._slabs)
        onboard = self._offers.open(self._slabs, self._slots.row_count_max, speed)
        self.is_direct = onboard.is_direct
        log.info(
            "cxl tier opened",
            extra={
                "memory": self.label,
                "bytes": self.populated_bytes,
                # Of one thread.
                "read": f"{speed.read_bytes_per_second / 1e9:.2f} GB/s",
                "write": f"{speed.write_bytes_per_second / 1e9:.2f} GB/s",
                "dram": f"{speed.dram_bytes_per_second / 1e9:.2f} GB/s",
                "onboard": "direct" if onboard.is_direct else "through dram",
                "why": onboard.why,
            },
        )
        self._base.core.post(
            LowerOpened(
                segment_bytes=self._slots.segment_bytes,
                segment_count=self._slots.segment_count,
                row_count_max=self._slots.row_count_max,
                lane_count=1,
                sequence_first=1,
                tier=TierName.CXL,
                is_direct=onboard.is_direct,
            )
        )

    # ----------------------------------------------------------------------------------- erasing

    @property
    def segment_count(self) -> int:
        return self._opened.segment_count

    def hindrance(self) -> str | None:
        """Why nothing can be erased, or ""; None until the core knows of the tier."""
        return {"populating": None, "on": ""}.get(self.state, self.state)

    def has_remains(self, held: RemainsHeld) -> bool:
        """Memory is fast, and a device keeps what a former daemon had in it."""
        return True

    async def erase(self, held: RemainsHeld) -> str:
        views = self._opened.range_views(held.segment, held.ranges)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, zero_all, views)
        if held.is_whole:
            self._opened.forget_life(held.segment)
        return ""

    def is_settled(self) -> bool:
        return True

    # ----------------------------------------------------------------------------- instructions

    def on_bind_segments(self, bound: BindSegments) -> None:
        self._opened.bind(bound.headers)

    def on_write_ready(self, written: WriteLowerReady) -> None:
        self._opened.write_checksums(written.lower_slots, written.checksums)

    def on_write_gone(self, written: WriteLowerGone) -> None:
        self._opened.write_gone(written.lower_slots)

    def on_demote(self, asked: Demote) -> None:
        self._begin(asked, self._dram.checksums(asked.slots))

    def on_promote(self, asked: Promote) -> None:
        self._begin(asked, self._opened.checksums(asked.lower_slots))

    # ------------------------------------------------------------------------------------- end

    def stop(self) -> None:
        """Wait for the copies under way: they use both pools."""
        self._is_over = True
        self._stock.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """After `stop`: the memory goes back where it came from."""
        self._offers.close()
        for slab in self._slabs:
            self._memory.source.end(slab)
        self._slabs.clear()
        self._memory.close()

    # --------------------------------------------------------------------------------- helpers

    @property
    def _opened(self) -> CxlSlots:
        assert self._slots is not None, "the cxl tier is used before it is open"
        return self._slots

    def _begin(self, asked: Demote | Promote, checksums: _Checksums) -> None:
        slots = asked.slots.tolist()
        batch = _Batch(
            asked=asked,
            checksums=checksums,
            upper=[view for slot in slots for view in self._dram.padded_views(slot)],
            lower=[
                view
                for slot in asked.lower_slots.tolist()
                for view in self._opened.padded_views(slot)
            ],
            began_at=self._base.clock.now(),
        )
        self.block_counts[batch.direction] += len(slots)
        self._threads.submit(self._copy, batch)

    def _copy(self, batch: _Batch) -> None:
        """In a thread."""
        try:
            outcomes = batch.run(self._memory.copy_batch)
        except BaseException as error:  # noqa: BLE001  # A mistake of ours ends the daemon.
            self._in_loop(partial(self._base.core.fail, error))
            return
        self._in_loop(partial(self._end, batch, outcomes))

    def _end(self, batch: _Batch, outcomes: _Outcomes) -> None:
        asked, metrics = batch.asked, self._base.metrics
        self.block_counts[batch.direction] -= len(asked.slots)
        corrupt_count = int((outcomes == _CORRUPT).sum())
        for outcome, count in (("done", len(outcomes) - corrupt_count), ("corrupt", corrupt_count)):
            metrics.cxl.transferred_blocks.labels(batch.direction, outcome).inc(count)
        metrics.cxl.transfer_seconds[batch.direction].observe(
            self._base.clock.now() - batch.began_at
        )
        if self._is_over:
            return
        kind = Demoted if isinstance(asked, Demote) else Promoted
        self._base.core.post(
            kind(
                namespace=asked.namespace,
                slots=asked.slots,
                lower_slots=asked.lower_slots,
                outcomes=outcomes,
                checksums=batch.checksums,
                tier=TierName.CXL,
            )
        )

    def _in_loop(self, work: Callable[[], None]) -> None:
        assert self._loop is not None, "the cxl tier was not started"
        call_soon(self._loop, partial(self._base.core.spawn, work))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Blocks on their way; the core keeps both ends taken until it hears of their end."""

    asked: Demote | Promote
    checksums: _Checksums  # Of the payloads; they go with the bytes.
    upper: Sequence[Bytes]  # All shards of all blocks with their padding, in DRAM …
    lower: Sequence[Bytes]  # … and in the tier.
    began_at: float

    @property
    def direction(self) -> str:
        return "demote" if isinstance(self.asked, Demote) else "promote"

    def run(self, copy_batch: CopyBatch) -> _Outcomes:
        """Copy. What has no checksum is no block: its slot was given up since it was asked for."""
        targets, sources = self.lower, self.upper
        if isinstance(self.asked, Promote):
            targets, sources = sources, targets
        copy_batch(targets, sources)
        return np.where(self.checksums != 0, _DONE, _CORRUPT)
