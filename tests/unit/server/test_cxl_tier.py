"""Copies between DRAM and the CXL tier: all bytes, and the checksum of each block beside them."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from kvtier.clock import SystemClock
from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.io.checksum import block_checksums
from kvtier.io.throttle import EmulatedSpeed
from kvtier.layout import SegmentHeader, SlotLayout
from kvtier.metrics import Metrics
from kvtier.namespace import NamespaceSpec
from kvtier.pools.cxl import EmulatedMemory
from kvtier.pools.dram import DramPool
from kvtier.pools.pool import SlabBinding
from kvtier.pools.slabs import PageKind, Slab, populate_slab
from kvtier.pools.source import MemorySource
from kvtier.server import cxl_tier
from kvtier.server.base import Base
from kvtier.server.core_loop import CoreLoop
from kvtier.server.cxl_tier import CxlKeeper
from kvtier.server.epochs import EpochStore
from kvtier.server.namespaces import Namespaces, padded_stride
from kvtier.server.segment_offers import Onboarding
from kvtier.types import BlockHash, NamespaceId, SlabId, SlabSetId, TierName
from tests.support.recording_core import RecordingManager

E = TypeVar("E")

SLAB_BYTES = 2 << 20
# Not a multiple of what shards are padded to.
SPEC = NamespaceSpec("test", "v1", "bfloat16", "LBHD", 16, shard_bytes=5000, shard_count=2)
LAYOUT = SlotLayout(SPEC.shard_bytes, SPEC.shard_count)
DONE, CORRUPT = ev.TransferOutcome.DONE, ev.TransferOutcome.CORRUPT
SLOT_COUNT = 16


class NoOffers:
    """Nobody maps the tier."""

    def open(self, slabs: object, row_count_max: int, speed: object) -> Onboarding:
        return Onboarding(False, "a test")

    def close(self) -> None:
        """Nothing was opened."""


NO_OFFERS = NoOffers()


def slots(*numbers: int) -> ev.Slots:
    return np.array(numbers, np.uint32)


class Rig:
    """One life of a CXL tier of two slabs beside a DRAM pool of 16 slots."""

    def __init__(self, directory: Path) -> None:
        clock = SystemClock()
        self.manager = RecordingManager()
        self.metrics = Metrics()
        core = CoreLoop(self.manager, clock=clock, metrics=self.metrics)
        epochs = EpochStore(directory, iter([7, 8]).__next__)
        self.namespaces = Namespaces(
            core, epochs, slab_bytes=SLAB_BYTES, slab_count_max=4, count_max=4, stride=padded_stride
        )
        base = Base(core, self.namespaces, clock, self.metrics)
        self.dram = DramPool(1)
        memory = EmulatedMemory(
            EmulatedSpeed(8e9), clock, slab_bytes=SLAB_BYTES, budget_bytes=2 * SLAB_BYTES
        )
        self.keeper = CxlKeeper(base, self.dram, memory, NO_OFFERS)

    async def open(self) -> NamespaceId:
        opened = await self.namespaces.open(SPEC)
        for number in (1, 2):
            self.dram.add_slab(
                populate_slab(SlabId(number), SLAB_BYTES, PageKind.BASE, clock=SystemClock())
            )
        self.dram.bind(
            SlabBinding(
                slab_set=SlabSetId(1),
                slabs=(SlabId(1), SlabId(2)),
                fingerprint=opened.fingerprint,
                slot_first=0,
                slot_count=SLOT_COUNT,
                slot_bytes=opened.slot_bytes,
                shard_bytes=SPEC.shard_bytes,
            )
        )
        self.keeper.start()
        [told] = await self.wait(ev.LowerOpened, 1)
        assert (told.tier, told.segment_count, told.segment_bytes) == (
            TierName.CXL,
            2,
            SLAB_BYTES,
        )
        header = SegmentHeader(1, opened.fingerprint, LAYOUT, SLAB_BYTES // LAYOUT.slot_bytes, 5)
        self.keeper.on_bind_segments(ins.BindSegments((header,), TierName.CXL))
        self.first = told.row_count_max  # Of segment 1.
        return opened.id

    async def wait(self, kind: type[E], count: int) -> list[E]:
        for _ in range(10_000):
            if len(self.manager.of(kind)) >= count:
                break
            await asyncio.sleep(0.002)
        return self.manager.of(kind)

    def fill(self, slot: int, seed: int) -> None:
        """A block in DRAM with its checksum in the table."""
        chance = np.random.default_rng(seed)
        for view in self.dram.views(slot):
            view[:] = chance.integers(0, 256, len(view), np.uint8)
        name = BlockHash(bytes([slot]) * 32)
        self.dram.write_ready(slots(slot), [name], [None], epoch=7, sequence=slot + 1)
        self.dram.write_checksums(slots(slot), block_checksums([self.dram.views(slot)]))

    async def demote(self, namespace: NamespaceId, upper: ev.Slots, lower: ev.Slots) -> ev.Demoted:
        count = len(self.manager.of(ev.Demoted)) + 1
        self.keeper.on_demote(ins.Demote(namespace, upper, lower, tier=TierName.CXL))
        found = (await self.wait(ev.Demoted, count))[-1]
        self.keeper.on_write_ready(
            ins.WriteLowerReady(
                namespace, lower, [], [], found.checksums, epoch=7, sequence=1, tier=TierName.CXL
            )
        )
        return found

    async def promote(self, namespace: NamespaceId, lower: ev.Slots, upper: ev.Slots) -> list[int]:
        count = len(self.manager.of(ev.Promoted)) + 1
        self.keeper.on_promote(ins.Promote(namespace, lower, upper, tier=TierName.CXL))
        found = (await self.wait(ev.Promoted, count))[-1]
        assert found.tier is TierName.CXL
        return found.outcomes.tolist()

    def close(self) -> None:
        self.keeper.stop()
        self.keeper.close()
        self.dram.close()


def test_blocks_go_down_and_come_back_with_every_byte(tmp_path: Path) -> None:
    async def story() -> None:
        rig = Rig(tmp_path)
        try:
            namespace = await rig.open()
            for slot in range(4):
                rig.fill(slot, seed=slot)
            lower = slots(*range(rig.first, rig.first + 4))
            told = await rig.demote(namespace, slots(0, 1, 2, 3), lower)
            assert told.outcomes.tolist() == [DONE] * 4
            assert await rig.promote(namespace, lower, slots(8, 9, 10, 11)) == [DONE] * 4
            for slot in range(4):
                for before, after in zip(
                    rig.dram.views(slot), rig.dram.views(slot + 8), strict=True
                ):
                    assert np.array_equal(before, after)
            assert rig.keeper.block_counts == {"demote": 0, "promote": 0}
        finally:
            rig.close()

    asyncio.run(story())


@pytest.mark.parametrize("refused_count", [1, 2])
def test_memory_that_engines_still_have_of_the_daemon_before_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_count: int
) -> None:
    refusals = iter([OSError(errno.ENOMEM, "lent")] * refused_count)
    populate = MemorySource.populate

    def refusing(*given: Any, **named: Any) -> Slab:
        if (error := next(refusals, None)) is not None:
            raise error
        return populate(*given, **named)

    monkeypatch.setattr(MemorySource, "populate", refusing)
    monkeypatch.setattr(cxl_tier, "ASK_AGAIN_SECONDS", 0.01)

    async def story() -> None:
        rig = Rig(tmp_path)
        try:
            await rig.open()  # All of it is there.
            assert rig.keeper.state == "on"
        finally:
            rig.close()

    asyncio.run(story())


@pytest.mark.parametrize("above", [True, False])
def test_a_checksum_goes_with_its_block_whatever_became_of_the_bytes(
    tmp_path: Path, above: bool
) -> None:
    """Nobody compares within memory: the sum must stay that of what was committed, or a later
    write to a disk would take what somebody scribbled for right."""

    async def story() -> None:
        rig = Rig(tmp_path)
        try:
            namespace = await rig.open()
            rig.fill(0, seed=1)
            right = rig.dram.checksums(slots(0))
            if above:
                rig.dram.views(0)[1][17] ^= 1
            told = await rig.demote(namespace, slots(0), slots(rig.first))
            if not above:
                rig.keeper._opened.padded_views(rig.first)[1][17] ^= 1
            assert await rig.promote(namespace, slots(rig.first), slots(8)) == [DONE]
            promoted = rig.manager.of(ev.Promoted)[-1]
            assert told.checksums.tolist() == promoted.checksums.tolist() == right.tolist()
            assert block_checksums([rig.dram.views(8)]) != right
        finally:
            rig.close()

    asyncio.run(story())


def test_a_slot_that_holds_nothing_any_more_is_read_as_corrupt(tmp_path: Path) -> None:
    """The core never asks for it; were it to, no former block's bytes may pass."""

    async def story() -> None:
        rig = Rig(tmp_path)
        try:
            namespace = await rig.open()
            rig.fill(0, seed=1)
            await rig.demote(namespace, slots(0), slots(rig.first))
            rig.keeper.on_write_gone(ins.WriteLowerGone(slots(rig.first), TierName.CXL))
            assert await rig.promote(namespace, slots(rig.first), slots(8)) == [CORRUPT]
        finally:
            rig.close()

    asyncio.run(story())


def test_a_mistake_in_a_copying_thread_ends_the_daemon(tmp_path: Path) -> None:
    async def story() -> None:
        rig = Rig(tmp_path)
        try:
            namespace = await rig.open()
            rig.fill(0, seed=1)

            def broken(targets: object, sources: object) -> None:
                raise AssertionError("planted")

            rig.keeper._memory.copy_batch = broken  # type: ignore[misc]
            rig.keeper.on_demote(
                ins.Demote(namespace, slots(0), slots(rig.first), tier=TierName.CXL)
            )
            with pytest.raises(AssertionError, match="planted"):
                async with asyncio.timeout(20):
                    await rig.keeper._base.core.wait_failed()
        finally:
            rig.close()

    asyncio.run(story())
