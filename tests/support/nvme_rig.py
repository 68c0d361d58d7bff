"""One life of a daemon's NVMe tier: disks in memory, and a core that writes down what it hears."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from kvtier.clock import SystemClock
from kvtier.config import NvmeConfig
from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.io.checksum import block_checksums
from kvtier.layout import SegmentHeader, SlotLayout
from kvtier.metrics import Metrics
from kvtier.namespace import NamespaceSpec
from kvtier.pools.dram import DramPool
from kvtier.pools.pool import SlabBinding
from kvtier.pools.slabs import PageKind, populate_slab
from kvtier.server.base import Base
from kvtier.server.core_loop import CoreLoop
from kvtier.server.epochs import EpochStore
from kvtier.server.namespaces import Namespaces, OpenedNamespace, padded_stride
from kvtier.server.nvme import NvmeKeeper
from kvtier.server.nvme_paths import NvmePaths
from kvtier.types import BlockHash, NamespaceId, SlabId, SlabSetId
from tests.support.crashing_file import Fault, FaultyDriver
from tests.support.nvme_pools import SEGMENT_BYTES, hash_of
from tests.support.recording_core import RecordingManager

E = TypeVar("E")

SPEC = NamespaceSpec("test", "v1", "bfloat16", "LBHD", block_tokens=16, shard_bytes=4000)
EPOCH = 7
DONE = ev.TransferOutcome.DONE
SLOT_COUNT = 64
SEGMENT_COUNT = 14
SECONDS_MAX = 20.0


def slots(*numbers: int) -> ev.Slots:
    return np.array(numbers, np.uint32)


class Over(Exception):
    """The end of a test's TaskGroup."""


@dataclass
class Rig:
    """One life of a daemon's NVMe tier; `drivers` outlive it."""

    directory: Path
    drivers: list[FaultyDriver]
    faults: dict[int, Fault]
    manager: RecordingManager = field(default_factory=RecordingManager)
    table_seconds: float = 0.01
    epochs: dict[bytes, int] = field(default_factory=lambda: {SPEC.fingerprint(): EPOCH})

    async def open(self) -> None:
        self.metrics = Metrics()
        self.core = CoreLoop(self.manager, clock=SystemClock(), metrics=self.metrics)
        self.namespaces = Namespaces(
            self.core,
            EpochStore(self.directory, iter([EPOCH, 8, 9]).__next__),
            slab_bytes=2 << 20,
            slab_count_max=4,
            count_max=4,
            stride=padded_stride,
        )
        self.base = Base(self.core, self.namespaces, SystemClock(), self.metrics)
        self.dram = DramPool(1)
        paths = NvmePaths(tuple(self.drivers), SEGMENT_COUNT * SEGMENT_BYTES)
        config = replace(NvmeConfig(), table_seconds=self.table_seconds)
        self.keeper = NvmeKeeper(self.base, self.dram, paths, config, lambda: self.epochs)
        await self.keeper.open()

    async def open_namespace(self) -> OpenedNamespace:
        """With slots 0 to 63 in memory."""
        opened = await self.namespaces.open(SPEC)
        slab = populate_slab(SlabId(1), 2 << 20, PageKind.BASE, clock=SystemClock())
        self.dram.add_slab(slab)
        self.dram.bind(
            SlabBinding(
                slab_set=SlabSetId(1),
                slabs=(SlabId(1),),
                fingerprint=opened.fingerprint,
                slot_first=0,
                slot_count=SLOT_COUNT,
                slot_bytes=opened.slot_bytes,
                shard_bytes=SPEC.shard_bytes,
            )
        )
        return opened

    def start(self, tasks: asyncio.TaskGroup) -> None:
        keeper = self.keeper
        self.core.start(
            tasks,
            {
                ins.Demote: keeper.on_demote,
                ins.Promote: keeper.on_promote,
                ins.BindSegments: keeper.on_bind_segments,
                ins.WriteLowerReady: keeper.on_write_ready,
                ins.WriteLowerGone: keeper.on_write_gone,
            },
        )
        keeper.start(tasks)

    async def heard(self, kind: type[E], count: int = 1) -> list[E]:
        """The events of one kind, once there are so many."""
        changed = asyncio.Event()
        self.manager.on_event = changed.set
        async with asyncio.timeout(SECONDS_MAX):
            while len(found := self.manager.of(kind)) < count:
                changed.clear()
                await changed.wait()
        return found

    def fill(self, slot: int, name: str) -> None:
        """A committed block with its checksum in memory."""
        [view] = self.dram.views(slot)
        np.copyto(view, np.resize(np.frombuffer(hash_of(name), np.uint8), len(view)))
        where = slots(slot)
        self.dram.write_ready(where, [hash_of(name)], [None], epoch=EPOCH, sequence=1)
        self.dram.write_checksums(where, block_checksums([[view]]))

    def holds(self, slot: int, name: str) -> bool:
        [view] = self.dram.views(slot)
        return bool((view == np.resize(np.frombuffer(hash_of(name), np.uint8), len(view))).all())

    def instruct(self, *instructions: ins.Instruction) -> None:
        """As the core does: inside an event."""
        waiting = list(instructions)

        def answer(_: ev.Event) -> list[ins.Instruction]:
            told, waiting[:] = list(waiting), []
            return told

        self.manager.answer = answer
        self.core.post(ev.Tick())

    def bind(self, *, segment: int = 0, sequence: int = 0) -> None:
        """This segment is the namespace's."""
        header = SegmentHeader(
            segment=segment,
            fingerprint=SPEC.fingerprint(),
            layout=SlotLayout(SPEC.shard_bytes, 1),
            slot_count=16,
            sequence=sequence or self.keeper._pool.sequence_first,
        )
        self.instruct(ins.BindSegments((header,)))

    async def demote(self, names: list[str], parents: list[BlockHash | None]) -> ev.Demoted:
        """From memory slots 0, 1, … to NVMe slots of the same numbers; written if all is well."""
        count = len(names)
        for slot, name in enumerate(names):
            self.fill(slot, name)
        where = slots(*range(count))
        before = len(self.manager.of(ev.Demoted))
        self.instruct(ins.Demote(NamespaceId(1), where, where))
        demoted = (await self.heard(ev.Demoted, before + 1))[-1]
        if (demoted.outcomes == DONE).all():
            self.instruct(
                ins.WriteLowerReady(
                    namespace=NamespaceId(1),
                    lower_slots=where,
                    hashes=[hash_of(name) for name in names],
                    parents=parents,
                    checksums=demoted.checksums,
                    epoch=EPOCH,
                    sequence=self.keeper._pool.sequence_first + 100,
                )
            )
        return demoted


def run(rig: Rig, test: Callable[[], Awaitable[None]], *, opened: bool = True) -> None:
    """One life: to the end of `test`, then closed as after a failure unless it was stopped."""

    async def body() -> None:
        await rig.open()
        try:
            async with asyncio.TaskGroup() as tasks:
                rig.start(tasks)
                if opened:
                    await rig.open_namespace()
                    await rig.heard(ev.LowerOpened)
                await test()
                raise Over
        finally:
            await rig.keeper.close()

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(body())
    for failure in caught.value.exceptions:
        if not isinstance(failure, Over):
            raise failure


def next_life(rig: Rig) -> Rig:
    """The same disks."""
    for driver in rig.drivers:
        driver.reopen()
    return Rig(rig.directory, rig.drivers, rig.faults)
