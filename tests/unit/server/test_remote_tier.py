"""The shell's side of the remote tier, on an engine in memory: endings, clears, and the search."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from kvtier.clock import SystemClock
from kvtier.codec.codecs import CodecId
from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.errors import KVTierError, Unavailable
from kvtier.io.checksum import block_checksums
from kvtier.io.threads import IoThreads
from kvtier.metrics import Metrics
from kvtier.metrics.labels import REMOTE_TROUBLES
from kvtier.namespace import NamespaceSpec
from kvtier.pools.dram import DramPool
from kvtier.pools.pool import SlabBinding
from kvtier.pools.remote.blocks import FixedCodec
from kvtier.pools.remote.breaking import BreakingEngine
from kvtier.pools.remote.buffers import Buffers
from kvtier.pools.remote.engine import TROUBLES, RemoteOutcome
from kvtier.pools.remote.epochs import EpochTimes
from kvtier.pools.remote.frame import FrameFault
from kvtier.pools.slabs import PageKind, populate_slab
from kvtier.server.base import Base
from kvtier.server.core_loop import CoreLoop
from kvtier.server.epochs import EpochStore
from kvtier.server.namespaces import Namespaces
from kvtier.server.owed_clears import OwedClears
from kvtier.server.remote import RemoteParts
from kvtier.server.remote_search import AbsentBlocks, RemoteSearch
from kvtier.server.remote_tier import RemoteKeeper
from kvtier.types import BlockHash, NamespaceId, PackedHashes, SlabId, SlabSetId, TierName
from tests.support.fake_remote import FakeRemote, Shelf
from tests.support.recording_core import RecordingManager

E = TypeVar("E")

SLAB_BYTES = 2 << 20
TIMES = EpochTimes(view_seconds=0.8, refresh_seconds=0.1, call_seconds=0.5)
SPEC = NamespaceSpec("test", "v1", "bfloat16", "LBHD", 16, shard_bytes=6000)
DONE, CORRUPT = ev.TransferOutcome.DONE, ev.TransferOutcome.CORRUPT
FAILED, REFUSED = ev.TransferOutcome.FAILED, ev.TransferOutcome.REFUSED


def slots(*numbers: int) -> ev.Slots:
    return np.array(numbers, np.uint32)


def names(letters: str) -> list[BlockHash]:
    return [BlockHash(letter.encode() * 32) for letter in letters]


class Over(Exception):
    """The end of a test's TaskGroup."""


class Node:
    """A daemon's remote tier beside a DRAM pool of 16 slots."""

    def __init__(self, directory: Path, shelf: Shelf, known_bytes: int = 1 << 30) -> None:
        directory.mkdir(exist_ok=True)
        clock = SystemClock()
        self.manager = RecordingManager()
        self.metrics = Metrics()
        self.core = CoreLoop(self.manager, clock=clock, metrics=self.metrics)
        self.namespaces = Namespaces(
            self.core,
            EpochStore(directory, iter([7, 8]).__next__),
            slab_bytes=SLAB_BYTES,
            slab_count_max=4,
            count_max=4,
        )
        base = Base(self.core, self.namespaces, clock, self.metrics)
        self.dram = DramPool(1)
        parts = RemoteParts(
            engine=BreakingEngine(FakeRemote(shelf), clock=clock, jitter=lambda: 0.0),
            threads=IoThreads("test-codec", count=2),
            buffers=Buffers(),
            make_chooser=lambda: FixedCodec(CodecId.NONE),
            timeout_seconds=0.5,
        )
        self.keeper = RemoteKeeper(
            base,
            self.dram,
            parts,
            known_bytes=known_bytes,
            owed=OwedClears(directory / "owed"),
            times=TIMES,
        )
        self.search = RemoteSearch(base, self.keeper)

    async def open(self, tasks: asyncio.TaskGroup) -> NamespaceId:
        self.keeper.start(tasks)
        self.search.start(tasks)
        opened = await self.namespaces.open(SPEC)
        self.dram.add_slab(populate_slab(SlabId(1), SLAB_BYTES, PageKind.BASE, clock=SystemClock()))
        self.dram.bind(
            SlabBinding(
                slab_set=SlabSetId(1),
                slabs=(SlabId(1),),
                fingerprint=opened.fingerprint,
                slot_first=0,
                slot_count=16,
                slot_bytes=opened.slot_bytes,
                shard_bytes=SPEC.shard_bytes,
            )
        )
        await self.wait_epoch()
        return opened.id

    async def wait_epoch(self) -> None:
        for _ in range(1000):
            if self.keeper.epoch_count:
                break
            await asyncio.sleep(0.005)

    def fill(self, slot: int, block: BlockHash) -> None:
        chance = np.random.default_rng(slot)
        [view] = self.dram.views(slot)
        view[:] = chance.integers(0, 256, len(view), np.uint8)
        self.dram.write_ready(slots(slot), [block], [None], epoch=7, sequence=slot + 1)
        self.dram.write_checksums(slots(slot), block_checksums([self.dram.views(slot)]))

    async def demote(self, namespace: NamespaceId, upper: ev.Slots, letters: str) -> list[int]:
        count = len(self.manager.of(ev.Demoted)) + 1
        lower = np.arange(len(upper), dtype=np.uint32)
        self.keeper.on_demote(ins.Demote(namespace, upper, lower, names(letters), TierName.REMOTE))
        return (await self.heard(ev.Demoted, count)).outcomes.tolist()

    async def promote(self, namespace: NamespaceId, upper: ev.Slots, letters: str) -> ev.Promoted:
        count = len(self.manager.of(ev.Promoted)) + 1
        lower = np.arange(len(upper), dtype=np.uint32)
        self.keeper.on_promote(
            ins.Promote(namespace, lower, upper, names(letters), TierName.REMOTE)
        )
        return await self.heard(ev.Promoted, count)

    async def heard(self, kind: type[E], count: int) -> E:
        for _ in range(4000):
            if len(self.manager.of(kind)) >= count:
                break
            await asyncio.sleep(0.005)
        return self.manager.of(kind)[count - 1]


@contextlib.asynccontextmanager
async def running(
    directory: Path, shelf: Shelf, known_bytes: int = 1 << 30
) -> AsyncIterator[tuple[Node, NamespaceId]]:
    node = Node(directory, shelf, known_bytes)
    try:
        async with asyncio.TaskGroup() as tasks:
            namespace = await node.open(tasks)
            yield node, namespace
            await node.keeper.close()
            raise Over
    except* Over:
        pass
    node.dram.close()


def test_blocks_go_there_and_come_to_another_node(tmp_path: Path) -> None:
    async def story() -> None:
        shelf = Shelf()
        async with (
            running(tmp_path / "a", shelf) as (first, here),
            running(tmp_path / "b", shelf) as (second, there),
        ):
            for slot, block in enumerate(names("ab")):
                first.fill(slot, block)
            assert await first.demote(here, slots(0, 1), "ab") == [DONE] * 2
            told = await second.promote(there, slots(4, 5, 6), "abc")
            assert told.outcomes.tolist() == [DONE, DONE, FAILED], "the last one is not there"
            for before, after in ((0, 4), (1, 5)):
                assert np.array_equal(first.dram.views(before)[0], second.dram.views(after)[0])
            expected = block_checksums([second.dram.views(slot) for slot in (4, 5)])
            assert told.checksums[:2].tolist() == expected.tolist()

    asyncio.run(story())


def test_an_engine_that_gives_another_blocks_value_is_not_believed(tmp_path: Path) -> None:
    async def story() -> None:
        shelf = Shelf()
        async with running(tmp_path, shelf) as (node, namespace):
            for slot, block in enumerate(names("ab")):
                node.fill(slot, block)
            await node.demote(namespace, slots(0, 1), "ab")
            first, second = shelf.values
            shelf.values[first] = shelf.values[second]
            told = await node.promote(namespace, slots(4, 5), "ab")
            assert sorted(told.outcomes.tolist()) == [DONE, CORRUPT]

    asyncio.run(story())


@pytest.mark.parametrize("trouble", [RemoteOutcome.UNREACHABLE, RemoteOutcome.TIMED_OUT])
def test_an_engine_in_trouble_costs_nothing_but_the_moment(
    tmp_path: Path, trouble: RemoteOutcome
) -> None:
    async def story() -> None:
        shelf = Shelf()
        async with running(tmp_path, shelf) as (node, namespace):
            node.fill(0, names("a")[0])
            assert await node.demote(namespace, slots(0), "a") == [DONE]
            shelf.trouble = trouble
            assert (await node.promote(namespace, slots(4), "a")).outcomes.tolist() == [REFUSED]
            assert await node.demote(namespace, slots(0), "a") == [REFUSED]
            shelf.trouble = None
            assert (await node.promote(namespace, slots(4), "a")).outcomes.tolist() == [DONE]

    asyncio.run(story())


def test_a_block_that_somebody_wrote_into_goes_nowhere(tmp_path: Path) -> None:
    async def story() -> None:
        shelf = Shelf()
        async with running(tmp_path, shelf) as (node, namespace):
            node.fill(0, names("a")[0])
            node.dram.views(0)[0][77] ^= 1
            assert await node.demote(namespace, slots(0), "a") == [CORRUPT]
            assert not shelf.values

    asyncio.run(story())


def test_a_clear_that_cannot_be_told_turns_the_tier_off_until_it_can(tmp_path: Path) -> None:
    async def story() -> None:
        shelf = Shelf()
        async with running(tmp_path, shelf) as (node, namespace):
            node.fill(0, names("a")[0])
            await node.demote(namespace, slots(0), "a")
            shelf.trouble = RemoteOutcome.UNREACHABLE
            number = await node.keeper.begin_clear(namespace)
            with pytest.raises(Unavailable, match="cleared on this node, but fake:"):
                await node.keeper.end_clear(namespace, number)
            shelf.trouble = None
            assert await node.keeper.exists_count(namespace, names("a")) is None
            assert (await node.promote(namespace, slots(4), "a")).outcomes.tolist() == [REFUSED]
            await node.wait_epoch()
            assert await node.keeper.exists_count(namespace, names("a")) == 0, "told by itself"

    asyncio.run(story())


def test_a_clear_that_is_owed_is_remembered_and_paid_by_the_next_life(tmp_path: Path) -> None:
    async def story() -> None:
        shelf = Shelf()
        async with running(tmp_path, shelf) as (node, namespace):
            node.fill(0, names("a")[0])
            await node.demote(namespace, slots(0), "a")
            await node.keeper.begin_clear(namespace)  # Its end never comes.
        async with running(tmp_path, shelf) as (node, namespace):
            assert await node.keeper.exists_count(namespace, names("a")) == 0, "cleared"
            for _ in range(1000):  # A thread forgets it.
                if not list((tmp_path / "owed").iterdir()):
                    break
                await asyncio.sleep(0.005)
            assert not list((tmp_path / "owed").iterdir())
        async with running(tmp_path, shelf) as (node, namespace):
            assert await node.keeper.exists_count(namespace, names("a")) == 0

    asyncio.run(story())


def test_a_clear_that_cannot_be_recorded_changes_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        shelf = Shelf()
        async with running(tmp_path, shelf) as (node, namespace):
            node.fill(0, names("a")[0])
            await node.demote(namespace, slots(0), "a")
            (tmp_path / "owed").write_text("no folder")
            with pytest.raises(KVTierError, match="nothing was changed"):
                await node.keeper.begin_clear(namespace)
            assert await node.keeper.exists_count(namespace, names("a")) == 1

    asyncio.run(story())


def test_a_clear_that_ends_does_not_turn_the_tier_on_under_another(tmp_path: Path) -> None:
    async def story() -> None:
        shelf = Shelf()
        async with running(tmp_path, shelf) as (node, namespace):
            first = await node.keeper.begin_clear(namespace)
            second = await node.keeper.begin_clear(namespace)
            await node.keeper.end_clear(namespace, first)
            assert await node.keeper.exists_count(namespace, names("a")) is None
            await node.keeper.end_clear(namespace, second)
            assert await node.keeper.exists_count(namespace, names("a")) == 0

    asyncio.run(story())


def test_the_search_tells_of_leading_blocks_and_asks_once_for_what_is_absent(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        shelf = Shelf()
        async with running(tmp_path, shelf) as (node, namespace):
            for slot, block in enumerate(names("bcd")):
                node.fill(slot, block)
            await node.demote(namespace, slots(0, 1, 2), "bcd")
            hashes = PackedHashes(b"".join(names("abcdx")), 32)
            task = node.search.begin(namespace, hashes, 1)
            assert task is not None
            assert node.search.begin(namespace, hashes, 1) is task, "somebody does already"
            await task
            [found] = node.manager.of(ev.BlocksFound)
            assert (found.parent, list(found.hashes)) == (names("a")[0], names("bcd"))
            assert (found.tier, found.epoch) == (TierName.REMOTE, 1)
            call_count = shelf.call_count
            assert node.search.begin(namespace, hashes, 4) is None, "it was not there just now"
            assert shelf.call_count == call_count
            assert node.search.begin(namespace, hashes, 5) is None, "nothing is missing"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("known_bytes", "segment_bytes", "count"),
    [(1 << 40, 256 << 20, 4096), (128 << 20, 2 << 20, 64), (1 << 20, 1 << 20, 2)],
)
def test_what_is_remembered_is_forgotten_in_small_parts(
    tmp_path: Path, known_bytes: int, segment_bytes: int, count: int
) -> None:
    async def story() -> None:
        async with running(tmp_path, Shelf(), known_bytes) as (node, _):
            [opened] = node.manager.of(ev.LowerOpened)
            assert (opened.segment_bytes, opened.segment_count) == (segment_bytes, count)
            assert node.keeper.known_bytes_max == segment_bytes * count

    asyncio.run(story())


def test_absent_blocks_are_forgotten_in_time_and_are_never_too_many() -> None:
    clock = SystemClock()
    absent = AbsentBlocks(clock, seconds=60.0, count_max=2)
    keys = [(NamespaceId(1), block) for block in names("abc")]
    for key in keys:
        absent.add(key)
    assert [key in absent for key in keys] == [False, True, True]
    assert len(absent) == 2
    over = AbsentBlocks(clock, seconds=0.0, count_max=2)
    over.add(keys[0])
    assert keys[0] not in over
    over.add(keys[1])
    assert len(over) == 1, "what is over takes memory"


def test_every_reason_of_trouble_has_its_metric() -> None:
    reasons = {str(one) for one in TROUBLES} | {str(fault) for fault in FrameFault}
    assert set(REMOTE_TROUBLES) == reasons
