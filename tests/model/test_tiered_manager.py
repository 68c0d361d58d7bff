"""The block manager with tiers below memory: memory and pools so small that all is reused all the
time.

On top of what engines may do (`test_block_manager.py`): leases that wait for promotion, transfers
that end late and badly, tables that lag behind, power cuts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core import lower_tier, retiring
from kvtier.core.events import TransferOutcome
from kvtier.core.settings import LowerSettings
from kvtier.types import Cut, NamespaceId, TierName
from tests.model.test_block_manager import (
    CONFIG,
    NAMESPACES,
    RIVAL,
    SHARDED,
    SHARED,
    SLOT_BYTES,
    BlockManagerMachine,
    paths,
    picks,
)
from tests.support.fake_disk import FakeDisk
from tests.support.fake_engine import FakeEngine
from tests.support.fake_mover import FakeMover, Transfer
from tests.support.lower_shell import LowerShell, readable_count
from tests.support.machines import machine_settings
from tests.support.world import World, chain

TIERED = replace(
    CONFIG,
    slab_bytes=6 * SLOT_BYTES,
    lower={
        TierName.NVME: LowerSettings(
            write_bytes_per_hour=1e9,
            transfer_bytes_max=4 * SLOT_BYTES,
            batch_blocks=3,
            batch_bytes=4 * SLOT_BYTES,
            retire_wait_seconds=3.0,
            prefetch_fraction_max=0.3,
        )
    },
)
TWO_RUNGS = replace(
    TIERED,
    lower={
        TierName.CXL: LowerSettings(
            write_bytes_per_hour=1e12,
            transfer_bytes_max=3 * SLOT_BYTES,
            batch_blocks=2,
            batch_bytes=3 * SLOT_BYTES,
            retire_wait_seconds=1.0,
            prefetch_fraction_max=0.2,
        ),
        **TIERED.lower,
    },
)
SLOT_BYTES_OF = {SHARED: SLOT_BYTES, RIVAL: 2 * SLOT_BYTES, SHARDED: SLOT_BYTES}
# Why a lease may rightly be shorter than what is resident.
EXCUSES = (Cut.PIN_LIMIT, Cut.NO_SPACE, Cut.UNMAPPED, Cut.DRAINING)

bits = st.integers(0, 2**16 - 1)


def chosen_by(number: int) -> Callable[[int], bool]:
    return lambda place: bool(number >> (place % 16) & 1)


class TieredManagerMachine(BlockManagerMachine):
    """Every rule of the other machine, and these."""

    config = TIERED

    def __init__(self) -> None:
        super().__init__()
        self.disks: dict[TierName, FakeDisk] = {}

    @initialize(
        segment_slots=st.integers(2, 4),
        segment_count=st.integers(2, 6),
        lane_count=st.integers(1, 2),
    )
    def start(self, segment_slots: int, segment_count: int, lane_count: int) -> None:
        self.disks[TierName.NVME] = FakeDisk(
            segment_bytes=segment_slots * SLOT_BYTES,
            segment_count=segment_count,
            row_count_max=4,
            lane_count=lane_count,
        )
        self.begin_and_use_all()
        if segment_count * segment_slots >= 16:  # Else others' blocks may have taken all of it.
            assert self.read_count > 0, "nothing comes up"

    def begin_and_use_all(self) -> None:
        self.world = World(self.config)
        self.engine_count = 0
        self.begin(open_lower=True, closed=None)
        for engine, path in product(range(3), ("aaa", "abb")):
            self.offload_to_the_end(engine, 0, path)
            self.world.finish_work()
        self.empty_memory()
        for engine in range(3):
            self.onboard_to_the_end(engine, 0, "aaa")
            self.onboard_to_the_end(engine, 0, "abb")
        for tier, disk in self.disks.items():
            assert disk.block_counts["demote"] > 0, f"nothing goes down to {tier}"

    # ---------------------------------------------------------------------------------- onboard

    @rule(
        engine=picks,
        namespace=picks,
        path=paths,
        seconds=st.sampled_from([1.0, 10.0, 30.0]),
        wait=st.sampled_from([0.4, 5.0, 25.0]),
        skip=st.integers(0, 2),
    )
    def acquire_waiting(
        self, engine: int, namespace: int, path: str, seconds: float, wait: float, skip: int
    ) -> None:
        one = self.engine(engine)
        mine = self.namespace_of(one, namespace)
        one.acquire(mine, chain(path), seconds=seconds, wait=wait, skip=skip)

    @rule(engine=picks, namespace=picks, path=paths)
    def onboard_to_the_end(self, engine: int, namespace: int, path: str) -> None:
        """What mostly happens; and what is there is leased."""
        one, hashes = self.engine(engine), chain(path)
        mine = self.namespace_of(one, namespace)
        self.world.finish_turns()
        before = readable_count(self.world.lower, self.world.namespaces[mine], hashes)
        outcomes: list[ins.LeaseGranted] = []
        one.acquire(mine, hashes, seconds=30.0, wait=20.0, on_granted=outcomes.append)
        self.world.finish_work()
        for granted in outcomes:
            # A place may have been taken from a later block of the chain that has no copy.
            count = min(before, self.world.told_count(mine, hashes))
            assert granted.cut is not Cut.DEADLINE
            assert granted.leased_count >= count or granted.cut in EXCUSES, (granted, count)
        if outcomes and one.leases:
            one.release(one.leases[-1])

    @rule(engine=picks)
    def release_pending(self, engine: int) -> None:
        self.engine(engine).release_pending()

    @rule(namespace=st.sampled_from(NAMESPACES), path=paths, is_prefetch=st.booleans())
    def hint(self, namespace: NamespaceId, path: str, is_prefetch: bool) -> None:
        kind = ev.Prefetch if is_prefetch else ev.HintPaused
        self.world.start(kind(namespace, chain(path)))

    @rule(engine=picks, namespace=picks, count=st.integers(1, 12))
    def take_memory(self, engine: int, namespace: int, count: int) -> None:
        """Somebody needs the slots: blocks with a copy are below only afterwards."""
        one = self.engine(engine)
        mine = self.namespace_of(one, namespace)
        one.reserve(mine, count)
        self.world.finish_turns()
        one.abort(mine, count)

    @rule()
    def empty_memory(self) -> None:
        """All slabs are exchanged: blocks with a copy are below only afterwards."""
        for one in sorted(self.world.sets):
            self.world.run_quietly(ev.WithdrawSlabSet(one))
        self.world.finish_turns()
        for engine in self.engines:
            self.read_all_mail(engine)  # Unmap the old ones …
        for engine, namespace in product(range(3), range(2)):
            self.take_memory(engine, namespace, 1)
            self.read_all_mail(self.engine(engine))  # … and map new ones.

    # -------------------------------------------------------------------------------- transfers

    @rule(
        pick=picks,
        outcome=st.sampled_from([*[TransferOutcome.DONE] * 4, *TransferOutcome]),
    )
    def end_transfer(self, pick: int, outcome: TransferOutcome) -> None:
        under_way = self.under_way()
        if not under_way:
            return
        mover, one = under_way[pick % len(under_way)]
        if outcome is TransferOutcome.CORRUPT and one.is_demotion:
            for engine, slot in product(self.engines, one.asked.slots.tolist()):
                engine.drop_corrupt(slot)
        mover.finish(one, outcome)

    @rule(pick=picks, member=picks)
    def move_one_block(self, pick: int, member: int) -> None:
        under_way = self.under_way()
        if under_way:
            mover, one = under_way[pick % len(under_way)]
            mover.move(one, member % len(one.outcomes))

    @rule(engine=picks, namespace=picks, path=paths)
    def offload_and_settle(self, engine: int, namespace: int, path: str) -> None:
        self.offload_to_the_end(engine, namespace, path)
        self.world.finish_work()

    @rule(
        engine=picks,
        pick=picks,
        kind=st.sampled_from(["lose", "break", "connect", "connect", "quiet", "die", "bye"]),
    )
    def trouble_process(self, engine: int, pick: int, kind: str) -> None:
        """As there, but less often: without engines nothing moves."""
        if pick < 24:
            super().trouble_process(engine, pick, kind)

    @rule()
    def finish_work(self) -> None:
        """What mostly happens: everything ends before the next thing begins."""
        self.world.finish_work()

    @rule(pick=picks)
    def flip_bits(self, pick: int) -> None:
        slots = [(disk, slot) for disk in self.disks.values() for slot in sorted(disk.rows)]
        if slots:
            disk, slot = slots[pick % len(slots)]
            disk.scribble(slot)

    # ------------------------------------------------------------------------------ the daemon

    @rule(pages=bits, is_synced=st.booleans())
    def write_table(self, pages: int, is_synced: bool) -> None:
        for disk in self.disks.values():
            disk.write_table(chosen_by(pages))
            if is_synced:
                disk.sync()

    @rule(readable=st.booleans(), pick=picks)
    def worsen_lower(self, readable: bool, pick: int) -> None:
        if self.world.lower and pick < 16:  # Not in every run.
            self.some_shell(pick).worsen(readable=readable)

    @rule(engine=picks, namespace=picks, path=paths, turns=st.integers(0, 6), pick=picks)
    def lose_lower(self, engine: int, namespace: int, path: str, turns: int, pick: int) -> None:
        """A pool cannot be read any more, and a read of it ends well after all."""
        if not self.world.lower or pick < 44:  # Not in every run.
            return
        self.acquire_waiting(engine, namespace, path, seconds=30.0, wait=5.0, skip=0)
        self.world.finish_turns()
        self.some_shell(pick).worsen(readable=False)
        for _ in range(turns):
            if self.world.turns:
                self.world.turn(0)
        for mover, one in self.under_way():
            if not one.is_demotion:
                mover.finish(one)

    @rule(
        kept=bits,
        open_lower=st.booleans(),
        closed=st.sampled_from([None, *NAMESPACES]),
        is_table_written=st.booleans(),
    )
    def cut_power(
        self, kept: int, open_lower: bool, closed: NamespaceId | None, is_table_written: bool
    ) -> None:
        if is_table_written:
            for disk in self.disks.values():
                disk.write_table()
                disk.sync()
        is_open = set(self.world.lower)
        self.world.restart(chosen_by(kept))
        for tier, disk in self.disks.items():
            if tier not in is_open:  # It was not even opened since the last time.
                disk.cut_power(chosen_by(kept))
            disk.readable = True
        self.begin(open_lower=open_lower, closed=closed)

    @rule(closed=st.sampled_from(NAMESPACES), last_path=paths)
    def reuse_what_nobody_has_opened(self, closed: NamespaceId, last_path: str) -> None:
        """Others fill the pool meanwhile; then somebody opens the namespace after all."""
        self.cut_power(2**16 - 1, open_lower=True, closed=None, is_table_written=True)
        self.settle(closed, ["abab", last_path])
        self.cut_power(2**16 - 1, open_lower=True, closed=closed, is_table_written=True)
        for namespace in NAMESPACES:
            if namespace != closed:
                self.settle(namespace, ["aaaa", "bbbb", "abab"])
        self.open_late()
        self.world.finish_turns()

    def settle(self, namespace: NamespaceId, paths: list[str]) -> None:
        """These chains are offloaded one after the other, and go down."""
        engine = 2 if namespace == SHARDED else 0
        for path in paths:
            self.offload_to_the_end(engine, NAMESPACES.index(namespace), path)
            self.read_all_mail(self.engine(engine))
            self.world.finish_work()

    @rule()
    def open_late(self) -> None:
        """The pools have been read at last; somebody uses a namespace again."""
        self.open_pools()
        for namespace, record in self.world.namespaces.items():
            if not record.is_open:
                self.open(namespace)
                for engine in self.engines:
                    engine.join(namespace)

    # ----------------------------------------------------------------------------------- helpers

    def begin(self, *, open_lower: bool, closed: NamespaceId | None) -> None:
        """A daemon starts, and engines find it."""
        for namespace in NAMESPACES:
            if namespace != closed:
                self.open(namespace)
        for _ in range(TIERED.slab_count_max - 1):
            self.world.populate_slab()
        if open_lower:
            self.open_pools()
        self.engines = [self.new_engine(1, True), self.new_engine(1, False)]
        self.engines.append(self.new_engine(2, False))
        for engine in self.engines:
            self.read_all_mail(engine)

    def new_engine(self, shard_count: int, together: bool) -> FakeEngine:
        self.engine_count += 1
        return FakeEngine(self.world, self.engine_count, shard_count=shard_count, together=together)

    def open(self, namespace: NamespaceId) -> None:
        self.world.open_namespace(
            namespace,
            slot_bytes=SLOT_BYTES_OF[namespace],
            shard_count=2 if namespace == SHARDED else 1,
        )

    def open_pools(self) -> None:
        for tier, disk in self.disks.items():
            if tier not in self.world.lower:
                self.world.open_lower(tier, disk)

    def under_way(self) -> list[tuple[FakeMover, Transfer]]:
        movers = [shell.mover for shell in self.world.lower.values()]
        return [(mover, one) for mover in movers for one in mover.under_way]

    def some_shell(self, pick: int) -> LowerShell:
        shells = list(self.world.lower.values())
        return shells[pick % len(shells)]

    @property
    def read_count(self) -> int:
        return sum(disk.block_counts["promote"] for disk in self.disks.values())


class TwoRungsMachine(TieredManagerMachine):
    """Above the pool a smaller one, volatile or not."""

    config = TWO_RUNGS
    read_counts: ClassVar[Counter[TierName]] = Counter()  # In all runs.

    @initialize(
        segment_counts=st.tuples(st.integers(2, 4), st.integers(3, 6)), is_volatile=st.booleans()
    )
    def start(self, segment_counts: tuple[int, int], is_volatile: bool) -> None:
        cxl_count, nvme_count = segment_counts
        self.disks[TierName.CXL] = FakeDisk(
            segment_bytes=3 * SLOT_BYTES,
            segment_count=cxl_count,
            row_count_max=3,
            is_volatile=is_volatile,
        )
        self.disks[TierName.NVME] = FakeDisk(
            segment_bytes=4 * SLOT_BYTES,
            segment_count=nvme_count,
            row_count_max=4,
            lane_count=2,
        )
        self.begin_and_use_all()
        assert self.read_count > 0, "nothing comes up"

    def teardown(self) -> None:
        super().teardown()
        for tier, disk in self.disks.items():
            self.read_counts[tier] += disk.block_counts["promote"]


class DirectMachine(TwoRungsMachine):
    """Engines are leased what lies in the pool above, as far as they have mapped it."""

    direct_count: ClassVar[int] = 0  # In all runs.

    def begin(self, *, open_lower: bool, closed: NamespaceId | None) -> None:
        self.disks[TierName.CXL].is_direct = True
        super().begin(open_lower=open_lower, closed=closed)
        for engine in self.engines:
            self.map_segments(engine)

    @rule(engine=picks, pick=picks, count=st.integers(1, 4))
    def map_some(self, engine: int, pick: int, count: int) -> None:
        one = self.engine(engine)
        one.map_segments(one.processes[pick % len(one.processes)], count)

    def begin_and_use_all(self) -> None:
        super().begin_and_use_all()
        for engine in range(3):
            self.lease_below(engine, 0, "ab", seconds=1.0)

    @rule(engine=picks, namespace=picks, path=paths, seconds=st.sampled_from([1.0, 30.0]))
    def lease_below(self, engine: int, namespace: int, path: str, seconds: float) -> None:
        """Blocks go down, memory is needed for others, and who does not wait asks for them."""
        one = self.engine(engine)
        self.offload_and_settle(engine, namespace, path)
        self.map_segments(one)
        self.empty_memory()
        one.acquire(self.namespace_of(one, namespace), chain(path), seconds=seconds)
        self.world.finish_turns()

    def map_segments(self, engine: FakeEngine) -> None:
        for process in engine.processes:
            engine.map_segments(process, self.disks[TierName.CXL].segment_count)

    def teardown(self) -> None:
        super().teardown()
        DirectMachine.direct_count += sum(one.tally.direct_count for one in self.engines)


@pytest.fixture(scope="class", autouse=True)
def small_slices() -> Iterator[None]:
    """So that all that is worked off in slices is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower_tier, "RECOVERED_SLICE_BLOCKS", 2)
        patch.setattr(lower_tier, "_LOST_SLICE_BLOCKS", 1)
        patch.setattr(retiring, "_EMPTIED_SLICE_BLOCKS", 1)
        yield


TestTieredManager = TieredManagerMachine.TestCase
TestTieredManager.settings = machine_settings(examples=20, steps=40, shrinks=False)
TestTieredManager.pytestmark = [pytest.mark.slow, pytest.mark.full_form]


@pytest.mark.slow
@pytest.mark.full_form
class TestTwoRungs:
    def test_both_laws_hold_and_blocks_come_up_from_either_tier(self) -> None:
        settings = machine_settings(examples=20, steps=40, shrinks=False)
        run_state_machine_as_test(TwoRungsMachine, settings=settings)
        assert min(TwoRungsMachine.read_counts[tier] for tier in TWO_RUNGS.lower) > 0


@pytest.mark.slow
@pytest.mark.full_form
class TestDirectLeases:
    def test_what_is_leased_where_it_lies_stays_there_until_the_lease_ends(self) -> None:
        settings = machine_settings(examples=10, steps=40, shrinks=False)
        run_state_machine_as_test(DirectMachine, settings=settings)
        assert DirectMachine.direct_count > 0
