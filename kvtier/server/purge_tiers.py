"""Overwriting what purged namespaces have left in memory and on the tiers below, in slices.

The core holds what nobody uses (`core/erasing.py`), threads overwrite it, and the core has it back.
What is still used is asked for again: a purge waits for leases and copies, and ends none of them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvtier.core.erasing_events import HoldRemains, HoldSlots, RemainsErased, SlotsErased
from kvtier.core.instructions import RemainsHeld, SlotsHeld
from kvtier.io.zero import zero_all
from kvtier.pools.dram import DramPool
from kvtier.server.core_loop import CoreLoop
from kvtier.server.finish import finish
from kvtier.server.namespaces import OpenedNamespace
from kvtier.server.purge_records import TierReport
from kvtier.types import TierName

# At once, in a thread: some 10 ms of memory bandwidth.
SLICE_BYTES = 64 << 20
# Between two looks at what somebody still uses.
WAIT_SECONDS = 0.05


@dataclass(slots=True)
class Progress:
    """What is being done, for whoever asks."""

    step: str = "waits for its turn"
    waits: str = ""  # For what.
    done_bytes: int = 0

    def begin(self, step: str) -> None:
        self.step, self.waits = step, ""

    def add(self, report: TierReport, *, count_bytes: int, places: int) -> None:
        report.bytes += count_bytes
        report.places += places
        self.done_bytes += count_bytes


class Erasable(Protocol):
    """The keeper of a tier whose slots lie in segments."""

    @property
    def segment_count(self) -> int: ...

    def hindrance(self) -> str | None:
        """Why nothing can be erased, or ""; None while that is not known."""
        ...

    def has_remains(self, held: RemainsHeld) -> bool:
        """Whether anything may ever have been written there."""
        ...

    async def erase(self, held: RemainsHeld) -> str:
        """Overwrite what is held; why that could not be done, or ""."""
        ...

    def is_settled(self) -> bool:
        """Whether the tier's books are written too; asked again until they are."""
        ...


async def erase_memory(
    core: CoreLoop,
    pool: DramPool,
    namespace: OpenedNamespace,
    report: TierReport,
    progress: Progress,
) -> None:
    """Every slot of the namespace, and its entry; returns when none is left."""
    block_bytes = namespace.slot_bytes * namespace.spec.shard_count
    count = max(1, SLICE_BYTES // block_bytes)
    while True:  # Ends: leases have deadlines, and engines that die give their slots back.
        held = await core.run(HoldSlots(namespace.id, count))
        assert isinstance(held, SlotsHeld), "HoldSlots has one kind of reply"
        if len(held.slots):
            await finish(_zero_slots(core, pool, held))
            held_bytes = len(held.slots) * block_bytes
            progress.add(report, count_bytes=held_bytes, places=len(held.slots))
        if held.left_count:
            continue
        if not held.waiting_count:
            return
        others = held.waiting_count - held.reserved_count - held.leased_count
        progress.waits = (
            f"{held.leased_count} slots under a lease, {held.reserved_count} that engines fill, "
            f"{others} that are copied or freed"
        )
        await asyncio.sleep(WAIT_SECONDS)


async def _zero_slots(core: CoreLoop, pool: DramPool, held: SlotsHeld) -> None:
    slots = held.slots.copy()
    slots.sort()
    await asyncio.to_thread(partial(zero_all, pool.whole_views(slots)))
    pool.write_gone(slots)
    core.post(SlotsErased(held.namespace, slots))


async def erase_lower(
    core: CoreLoop, tier: TierName, keeper: Erasable, report: TierReport, progress: Progress
) -> str:
    """All remains in the tier, whoever fills the segments now; why something was left, or ""."""
    while (hindrance := keeper.hindrance()) is None:
        progress.waits = "its pool is not open yet"
        await asyncio.sleep(WAIT_SECONDS)
    if hindrance:
        return hindrance
    segments, trouble = list(range(keeper.segment_count)), ""
    while segments:  # Ends: reads and writes come back, and the core begins no more of them.
        waiting = []
        for segment in segments:
            held = await core.run(HoldRemains(tier, segment))
            assert isinstance(held, RemainsHeld), "HoldRemains has one kind of reply"
            if held.is_waiting:
                waiting.append(segment)
                continue
            trouble = await _erase(core, keeper, held, report, progress) or trouble
            await asyncio.sleep(0)
        segments = waiting
        if segments:
            progress.waits = f"{len(segments)} segments that are read or written"
            await asyncio.sleep(WAIT_SECONDS)
    progress.waits = "the slot table is written"
    while True:  # Ends: the disk takes the table, or the tier is worse off.
        if keeper.is_settled() or keeper.hindrance():
            return keeper.hindrance() or trouble
        await asyncio.sleep(WAIT_SECONDS)


async def _erase(
    core: CoreLoop, keeper: Erasable, held: RemainsHeld, report: TierReport, progress: Progress
) -> str:
    trouble = ""
    if held.ranges and keeper.has_remains(held):
        trouble = await keeper.erase(held)
        if not trouble:
            erased_bytes = sum(length for _, length in held.ranges)
            progress.add(report, count_bytes=erased_bytes, places=1)
    core.post(RemainsErased(held.tier, held.segment))
    return trouble
