"""Purges beside everything else: memory and pools so small that all is reused all the time.

What a tenant has left is searched for by content when its purge has ended, as in the daemon's crash
tests. And the core comes to rest by itself, also while a purge keeps a segment to itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core import retiring
from kvtier.core.erasing_events import (
    EraseBegun,
    EraseEnded,
    HoldRemains,
    HoldSlots,
    RemainsErased,
    SlotsErased,
)
from kvtier.core.events import TransferOutcome
from kvtier.core.settings import LowerSettings, ManagerConfig
from kvtier.core.tenancy import TenantBudget
from kvtier.types import NamespaceId, TierName
from tests.model.test_tiered_manager import EXCUSES
from tests.support.adopting import restart
from tests.support.erasing import wipe_remains, wipe_slots
from tests.support.fake_disk import FakeDisk
from tests.support.fake_engine import FakeEngine
from tests.support.fake_mover import FakeMover
from tests.support.forms import state_finding
from tests.support.lower_shell import readable_count
from tests.support.machines import machine_settings
from tests.support.world import World, chain

NVME = TierName.NVME
SLOT_BYTES = 4096
# Each tenant's blocks say whose they are: their paths have letters of their own.
LETTERS = {"red": "ab", "blue": "cd", "green": "ef"}
NAMESPACES = {owner: NamespaceId(number) for number, owner in enumerate(LETTERS, start=1)}
PATHS = {
    owner: ["".join(path) for path in product(letters, repeat=3)]
    for owner, letters in LETTERS.items()
}
LENGTH_MAX = 9
CONFIG = ManagerConfig(
    slab_bytes=10 * SLOT_BYTES,
    slab_count_max=6,
    stock_divisor=1,
    slice_blocks=2,
    lease_slice_blocks=2,
    evict_slice_blocks=2,
    swept_slice_blocks=2,
    idle_seconds=100.0,
    pin_fraction_max=0.7,
    lower={
        NVME: LowerSettings(
            write_bytes_per_hour=1e9,
            transfer_bytes_max=4 * SLOT_BYTES,
            batch_blocks=2,
            batch_bytes=4 * SLOT_BYTES,
            retire_wait_seconds=3.0,
        )
    },
)
# A tenant may have as little as one segment.
CAPPED = {"red": TenantBudget(maximum=0.34)}
# Without new calls each block goes down once for what asked for it, and once more if it was used.
DEMOTED_MAX = 4 * sum(LENGTH_MAX * len(paths) for paths in PATHS.values())
ROUNDS_MAX = 60  # Of a purge that waits: leases of a former life last longest.
ALL_SLOTS = 100

owners = st.sampled_from(list(LETTERS))
picks = st.integers(0, 63)
lengths = st.integers(1, LENGTH_MAX)


def path_of(owner: str, pick: int, length: int) -> str:
    """Some share a beginning, others do not."""
    return (PATHS[owner][pick % len(PATHS[owner])] * LENGTH_MAX)[:length]


CHAINS = [chain(path_of(owner, pick, LENGTH_MAX)) for owner in LETTERS for pick in range(8)]


@dataclass
class Purge:
    """One that is under way, step by step."""

    owner: str
    segments: list[int]
    held_slots: list[ins.SlotsHeld] = field(default_factory=list)
    held_segments: list[ins.RemainsHeld] = field(default_factory=list)


class PurgeMachine(RuleBasedStateMachine):
    """Three tenants on one pool; one of them is purged at a time."""

    totals: ClassVar[Counter[str]] = Counter()  # Purges that ended, hits of others' blocks then.

    @initialize(
        segment_slots=st.integers(2, 4),
        segment_count=st.integers(2, 4),
        lane_count=st.integers(1, 2),
        is_capped=st.booleans(),
    )
    def start(
        self, segment_slots: int, segment_count: int, lane_count: int, is_capped: bool
    ) -> None:
        self.disk = FakeDisk(
            segment_bytes=segment_slots * SLOT_BYTES,
            segment_count=segment_count,
            row_count_max=4,
            lane_count=lane_count,
            is_written_ahead=True,
        )
        self.world = World(replace(CONFIG, tenants=CAPPED if is_capped else {}))
        self.purge: Purge | None = None
        self.engine_count = 0
        self.begin()
        for owner, pick in product(LETTERS, range(3)):
            self.offload(owner, pick, 5)
            self.use(owner, pick, 5)
        assert self.disk.block_counts["demote"] > 0, "nothing goes down"

    # ------------------------------------------------------------------------------ what is asked

    @rule(owner=owners, pick=picks, length=lengths)
    def offload(self, owner: str, pick: int, length: int) -> None:
        one, mine = self.engines[owner], NAMESPACES[owner]
        hashes = chain(path_of(owner, pick, length))
        self.read_mail(one)
        one.reserve(mine, length)
        self.world.finish_turns()
        one.offload(mine, hashes)
        for copy in list(one.copies):
            one.run_copy(copy)
        for offload in list(one.offloads):
            one.commit(offload)
        self.world.finish_turns()

    @rule(owner=owners, count=st.integers(1, 6))
    def leave_reserved(self, owner: str, count: int) -> None:
        self.engines[owner].reserve(NAMESPACES[owner], count)
        self.world.finish_turns()

    @rule(owner=owners, pick=picks, length=lengths, is_kept=st.booleans())
    def use(self, owner: str, pick: int, length: int, is_kept: bool = False) -> None:
        """And what is there is leased."""
        one, mine = self.engines[owner], NAMESPACES[owner]
        hashes = chain(path_of(owner, pick, length))
        self.world.finish_turns()
        before = readable_count(self.world.lower, self.world.namespaces[mine], hashes)
        outcomes: list[ins.LeaseGranted] = []
        one.acquire(mine, hashes, seconds=9.0, wait=5.0, on_granted=outcomes.append)
        self.rest()
        for granted in outcomes:
            # A place may have been taken from a later block of the chain that has no copy.
            count = min(before, self.world.told_count(mine, hashes))
            assert granted.leased_count >= count or granted.cut in EXCUSES, (granted, count)
        if one.leases and not is_kept:
            one.release(one.leases[-1])

    @rule(owner=owners, pick=picks, length=lengths)
    def evict(self, owner: str, pick: int, length: int) -> None:
        self.world.run(ev.Evict(NAMESPACES[owner], chain(path_of(owner, pick, length))))

    @rule(owner=owners, count=st.integers(1, 40))
    def take_memory(self, owner: str, count: int) -> None:
        """Somebody needs the slots: blocks with a copy are below only afterwards."""
        self.leave_reserved(owner, count)
        self.engines[owner].abort(NAMESPACES[owner], count)

    @rule(owner=owners)
    def clear(self, owner: str) -> None:
        self.world.clear(NAMESPACES[owner])

    # ------------------------------------------------------------------------------ what goes on

    @rule(pick=picks)
    def go_on(self, pick: int) -> None:
        if self.world.turns:
            self.world.turn(pick)
        elif self.world.checksums:
            self.world.compute_checksums(pick)

    @rule(
        pick=picks, outcome=st.sampled_from([*[TransferOutcome.DONE] * 4, TransferOutcome.FAILED])
    )
    def end_transfer(self, pick: int, outcome: TransferOutcome) -> None:
        under_way = self.world.under_way
        if under_way:
            self.mover.finish(under_way[pick % len(under_way)], outcome)

    @rule(seconds=st.sampled_from([0.5, 5.0, 20.0]))
    def tick(self, seconds: float) -> None:
        self.pass_time(seconds)

    @rule()
    def rest(self) -> None:
        """Nobody asks for anything: all that is under way ends, and nothing begins for ever."""
        before = self.disk.block_counts["demote"]
        self.world.finish_turns()
        while self.world.checksums or self.world.under_way:
            if self.world.checksums:
                self.world.compute_checksums(0)
            else:
                self.mover.finish(self.world.under_way[0])
            self.world.finish_turns()
            demoted = self.disk.block_counts["demote"] - before
            assert demoted <= DEMOTED_MAX, "blocks go down for ever"

    @rule(owner=owners)
    def replace_engine(self, owner: str) -> None:
        for process in self.engines[owner].processes:
            self.engines[owner].die(process)
        self.engines[owner] = self.new_engine(owner)

    @rule(kept=st.integers(0, 2**16 - 1), is_table_written=st.booleans())
    def kill_and_adopt(self, kept: int, is_table_written: bool) -> None:
        self.end_life(kept, is_table_written)
        if self.purge is not None:  # Before anything of the former life is read.
            record = self.world.namespaces[NAMESPACES[self.purge.owner]]
            record.begin_epoch(self.world.new_epoch())
        restart(self.world, list(self.engines.values()), before=self.open_pool)
        for one in self.engines.values():
            for process in one.processes:
                one.connect(process)
                while process.own_old:
                    one.declare_own_quiet(process)
            self.read_mail(one)
        self.begin_again()

    # ------------------------------------------------------------------------------------- purges

    @rule(owner=owners)
    def begin_purge(self, owner: str) -> None:
        if self.purge is None:
            self.purge = Purge(owner, list(range(self.disk.segment_count)))
            self.world.clear(NAMESPACES[owner])
            self.begin_again()

    @rule(owner=owners)
    def purge_at_once(self, owner: str) -> None:
        """What mostly happens; the one that is under way ends first."""
        self.end_purge()
        self.begin_purge(owner)
        self.end_purge()

    @rule(count=st.integers(1, 12))
    def hold_slots(self, count: int) -> None:
        if self.purge is not None:
            held = self.world.run(HoldSlots(NAMESPACES[self.purge.owner], count))
            assert isinstance(held, ins.SlotsHeld)
            self.purge.held_slots.append(held)

    @rule()
    def erase_slots(self) -> None:
        if self.purge is not None and self.purge.held_slots:
            held = self.purge.held_slots.pop()
            wipe_slots(self.world, held)
            self.world.run_quietly(SlotsErased(held.namespace, held.slots))

    @rule(pick=picks)
    def hold_segment(self, pick: int) -> None:
        if self.purge is not None and self.purge.segments:
            segment = self.purge.segments[pick % len(self.purge.segments)]
            held = self.world.run(HoldRemains(NVME, segment))
            assert isinstance(held, ins.RemainsHeld)
            if not held.is_waiting:
                self.purge.segments.remove(segment)
                self.purge.held_segments.append(held)

    @rule()
    def erase_segment(self) -> None:
        if self.purge is not None and self.purge.held_segments:
            held = self.purge.held_segments.pop()
            wipe_remains(self.mover, self.disk, held)
            self.world.run_quietly(RemainsErased(NVME, held.segment))

    @rule(owner=owners, pick=picks, length=lengths)
    def purge_what_has_changed_hands(self, owner: str, pick: int, length: int) -> None:
        """Segments are others' by now, with what is in them."""
        self.offload(owner, pick, LENGTH_MAX)
        self.rest()
        self.clear(owner)
        for other in LETTERS:
            if other != owner:
                self.offload(other, pick, length)
        self.rest()
        self.purge_at_once(owner)

    @rule(owner=owners, pick=picks, length=lengths)
    def work_beside_an_erasure(self, owner: str, pick: int, length: int) -> None:
        """Somebody needs room while a segment, or two, are being overwritten."""
        self.begin_purge(owner)
        self.hold_segment(pick)
        for other in LETTERS:
            self.offload(other, pick, length)
            self.use(other, pick, length)
        self.erase_segment()

    @rule()
    def end_purge(self) -> None:
        """It needs no more than that engines answer and leases end; then nothing is left."""
        purge = self.purge
        if purge is None:
            return
        self.erase_memory(purge)
        for _ in range(ROUNDS_MAX):
            if not purge.segments and not purge.held_segments:
                break
            self.hold_segment(0)
            self.erase_segment()
            self.rest()
        assert not purge.segments, "a purge has no end"
        self.disk.write_table()
        self.disk.sync()
        self.assert_nothing_left(purge.owner)
        namespace = NAMESPACES[purge.owner]
        self.world.run_quietly(EraseEnded(self.world.namespaces[namespace].fingerprint, namespace))
        self.purge = None
        self.totals["purges"] += 1
        self.look_for_others(purge.owner)

    def erase_memory(self, purge: Purge) -> None:
        for _ in range(ROUNDS_MAX):
            self.hold_slots(ALL_SLOTS)
            last = purge.held_slots[-1]
            while purge.held_slots:
                self.erase_slots()
            if not last.left_count and not last.waiting_count:
                return
            for one in self.engines.values():
                self.read_mail(one)
            self.rest()
            self.pass_time(5.0)
        raise AssertionError(f"a purge has no end: {last}")

    def assert_nothing_left(self, owner: str) -> None:
        letters = LETTERS[owner].encode()
        stats = self.world.manager.stats()
        [counts] = [one for one in stats.namespaces if one.namespace == NAMESPACES[owner]]
        assert (counts.block_count, counts.ready_count, counts.free_count) == (
            *(0, 0),
            counts.slot_count,
        )
        texts = {
            **{("nvme", slot): stamp for slot, stamp in self.disk.stamps.items()},
            **{
                ("dram", slot): (text,)
                for (slot, _), text in self.world.content.items()
                if any(slot in bound.slots for bound in self.world.sets.values())
            },
        }
        left = [place for place, stamp in texts.items() if is_of(letters, stamp)]
        assert not left, f"bytes of {owner} are left in {left}"

    def look_for_others(self, purged: str) -> None:
        """Whatever is said to be there is, and is right."""
        for owner, one in self.engines.items():
            if owner != purged:
                before = one.tally.hit_count
                for pick in range(8):
                    self.use(owner, pick, LENGTH_MAX)
                self.totals["hits"] += one.tally.hit_count - before

    # --------------------------------------------------------------------------------- invariants

    @invariant()
    def nothing_is_wrong(self) -> None:
        self.world.check(CHAINS)

    @invariant()
    def what_is_erased_is_nobodys(self) -> None:
        for one in self.engines.values():
            for held in one.leases:
                one.read(held)

    def teardown(self) -> None:
        if not hasattr(self, "purge"):
            return
        self.end_purge()
        self.rest()
        for one in self.engines.values():
            for process in one.processes:
                one.die(process)
        self.pass_time(100.0)
        self.rest()
        assert self.world.manager.check_invariants() == []
        self.world.assert_all_free()

    # ------------------------------------------------------------------------------------ helpers

    def begin(self) -> None:
        for owner, namespace in NAMESPACES.items():
            self.world.open_namespace(namespace, slot_bytes=SLOT_BYTES, tenant=owner)
        for _ in range(CONFIG.slab_count_max - 1):
            self.world.populate_slab()
        self.open_pool()
        self.engines = {owner: self.new_engine(owner) for owner in LETTERS}

    def begin_again(self) -> None:
        """As every life of the daemon does that finds a purge not ended."""
        purge = self.purge
        if purge is None:
            return
        purge.segments = list(range(self.disk.segment_count))
        purge.held_slots, purge.held_segments = [], []
        namespace = NAMESPACES[purge.owner]
        self.world.start(EraseBegun(self.world.namespaces[namespace].fingerprint, namespace))

    def end_life(self, kept: int, is_table_written: bool) -> None:
        """By kill -9: blocks that were written stay so, the table may lag behind."""
        self.disk.sync()
        if is_table_written:
            self.disk.write_table()
            self.disk.sync()
        for shell in self.world.lower.values():
            shell.cut_power(lambda place: bool(kept >> (place % 16) & 1))
        self.world.lower.clear()

    def open_pool(self) -> None:
        self.world.open_lower(NVME, self.disk)

    @property
    def mover(self) -> FakeMover:
        return self.world.lower[NVME].mover

    def new_engine(self, owner: str) -> FakeEngine:
        self.engine_count += 1
        one = FakeEngine(self.world, self.engine_count, shard_count=1, together=True, tenant=owner)
        self.read_mail(one)
        return one

    def read_mail(self, engine: FakeEngine) -> None:
        for process in engine.processes:
            for _ in range(20):
                engine.read_mail(process)

    def pass_time(self, seconds: float) -> None:
        for one in self.engines.values():
            one.run_dma()
        self.world.now += seconds
        self.world.run_quietly(ev.Tick())
        for one in self.engines.values():
            one.leases = [held for held in one.leases if held.deadline > self.world.now]


def is_of(letters: bytes, stamp: tuple[bytes, ...]) -> bool:
    return any(set(text.lstrip(b".")) & set(letters) for text in stamp if text[:1] == b".")


@pytest.fixture(scope="class", autouse=True)
def small_slices() -> Iterator[None]:
    """So that all that is worked off in slices is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retiring, "_EMPTIED_SLICE_BLOCKS", 1)
        yield


@pytest.mark.slow
@pytest.mark.full_form
class TestPurge:
    def test_nothing_of_the_purged_is_left_and_the_core_comes_to_rest(self) -> None:
        settings = machine_settings(examples=40, steps=40, shrinks=False)
        run_state_machine_as_test(PurgeMachine, settings=settings)
        state_finding(f"purges in the model: {dict(PurgeMachine.totals)}")
        assert PurgeMachine.totals["purges"] > 20
        assert PurgeMachine.totals["hits"] > 100
