"""What the next life finds is true, wherever this one ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from mmap import PAGESIZE

import numpy as np
import pytest

from kvtier.io.memory import create_memfd
from kvtier.pools import table_versions
from kvtier.pools.slot_table import ENTRY_BYTES, FORMAT_VERSION, SlotTable, read_entries
from kvtier.server.holder import close_all
from kvtier.server.inventory import (
    HALF_BYTES,
    Inventory,
    InventoryFile,
    ParkedSession,
    ParkedSet,
    ParkedSlab,
    read_inventory,
)
from kvtier.server.keeping import INVENTORY, TABLE, TRIES_MAX, Keeper
from kvtier.server.parking import ParkingFailed, is_same_file
from tests.support.parking_places import Killed, MemoryParking

GENERATION = 7
SLOT_COUNT = 16


def set_of(number: int) -> ParkedSet:
    slab = ParkedSlab(f"slab-{number}", number, "base")
    return ParkedSet("00" * 16, (slab,), (number - 1) * SLOT_COUNT, SLOT_COUNT, 4096, 4000)


def session(number: int, **facts: object) -> ParkedSession:
    made = ParkedSession(number, "ab" * 16, "BOTH", (0,), False, number, "LIVE", token="cd")
    return replace(made, pidfd=f"process-{number}", **facts)  # type: ignore[arg-type]


class Lives:
    """One parking place, its lives, and their files."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}
        self.table = SlotTable(GENERATION)
        self.slab = create_memfd("kvtier-slab", 4096)

    def keeper(self, *, requests_max: int | None = None) -> Keeper:
        return Keeper(MemoryParking(self.kept, requests_max=requests_max))

    def begin(self, *, requests_max: int | None = None) -> Keeper:
        keeper = self.keeper(requests_max=requests_max)
        fd = self.table.fd if keeper.former is None else keeper.former.table_fd
        keeper.begin(GENERATION, fd, hold_seconds=65.0)
        return keeper

    def found(self) -> Inventory | None:
        """What a life would find that begins now."""
        keeper = self.keeper()
        found = None if keeper.former is None else keeper.former.inventory
        if keeper.former is not None:
            close_all([keeper.former.inventory_fd, keeper.former.table_fd])
        keeper.close()
        return found


@pytest.fixture
def lives() -> Iterator[Lives]:
    lives = Lives()
    yield lives
    close_all([*lives.kept.values(), lives.slab])
    lives.table.close()


def keep_two_drop_one(lives: Lives, keeper: Keeper) -> None:
    keeper.keep_set(set_of(1), [lives.slab])
    keeper.keep_process("process-1", lives.slab)
    keeper.note_sessions([session(1)])
    keeper.keep_set(set_of(2), [lives.slab])
    keeper.drop_set(set_of(1).slot_first)
    keeper.note_sessions([])


def test_the_next_life_finds_sets_sessions_and_numbers(lives: Lives) -> None:
    keeper = lives.begin()
    keeper.keep_set(set_of(1), [lives.slab])
    keeper.keep_process("process-1", lives.slab)
    keeper.note_sessions([session(1)])
    keeper.keep_namespace("{}")
    until = keeper.sessions_until(1)
    keeper.close()
    found = lives.found()
    assert found is not None
    assert (found.sets, found.sessions, found.namespaces) == ((set_of(1),), (session(1),), ("{}",))
    assert (found.slot_next, found.slab_next, found.session_next) == (SLOT_COUNT, 2, until)
    assert found.hold_seconds == 65.0


def test_leases_of_each_life_have_higher_numbers_than_those_before(lives: Lives) -> None:
    firsts = []
    for _ in range(3):
        keeper = lives.begin()
        firsts.append(keeper.lease_first)
        keeper.close()
    assert [later - former for former, later in itertools.pairwise(firsts)] == [
        1 << 40,
        1 << 40,
    ]


def test_numbers_of_dropped_slots_are_not_given_again(lives: Lives) -> None:
    keeper = lives.begin()
    keep_two_drop_one(lives, keeper)
    keeper.drop_set(set_of(2).slot_first)
    keeper.close()
    found = lives.found()
    assert found is not None
    assert (found.sets, found.slot_next, found.slab_next) == ((), 2 * SLOT_COUNT, 3)
    assert set(lives.kept) == {INVENTORY, TABLE}


@pytest.mark.parametrize("steps_max", range(17))
def test_wherever_a_life_ends_the_inventory_names_only_what_is_parked(
    lives: Lives, steps_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = MemoryParking(lives.kept, requests_max=steps_max)
    write = InventoryFile.write

    def write_counted(file: InventoryFile, inventory: Inventory) -> None:
        place.count()
        write(file, inventory)

    monkeypatch.setattr(InventoryFile, "write", write_counted)
    keeper = Keeper(place)
    ended = False
    try:
        keeper.begin(GENERATION, lives.table.fd, hold_seconds=65.0)
        keep_two_drop_one(lives, keeper)
    except Killed:
        ended = True
    assert ended == (steps_max < 14), "the story has fourteen steps"
    found = lives.found()
    if found is not None:
        named = {slab.name for one in found.sets for slab in one.slabs}
        named |= {one.pidfd for one in found.sessions}
        assert named <= set(lives.kept)


@pytest.mark.parametrize("requests_max", range(6))
def test_an_old_inventory_never_stands_beside_a_new_table(lives: Lives, requests_max: int) -> None:
    """Its slots would look as if nobody used them."""
    file = InventoryFile()
    file.write(Inventory(5, table_version=99, slot_next=48, sets=(set_of(1),), table=TABLE))
    old = SlotTable(5)
    MemoryParking(lives.kept).park(INVENTORY, file.fd)
    MemoryParking(lives.kept).park(TABLE, old.fd)
    with contextlib.suppress(Killed):
        lives.begin(requests_max=requests_max)
    is_old_table = is_same_file(lives.kept[TABLE], old.fd)
    is_old = INVENTORY in lives.kept and is_same_file(lives.kept[INVENTORY], file.fd)
    assert not is_old or is_old_table
    file.close()
    old.close()


@pytest.mark.parametrize("requests_max", range(4))
def test_a_table_of_an_earlier_build_is_converted_and_never_lost(
    lives: Lives, requests_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_versions, "CONVERTERS", {FORMAT_VERSION - 1: lambda found: found})
    earlier = Inventory(GENERATION, FORMAT_VERSION - 1, 16, sets=(set_of(1),), table="earlier")
    file = InventoryFile()
    file.write(earlier)
    for name, fd in ((INVENTORY, file.fd), ("earlier", lives.table.fd), ("slab-1", lives.slab)):
        MemoryParking(lives.kept).park(name, fd)
    with contextlib.suppress(Killed):
        lives.begin(requests_max=requests_max)
    found = lives.found()
    assert found is not None
    assert found.sets == earlier.sets
    is_done = requests_max >= 2
    assert (found.table, found.table_version) == (
        (TABLE, FORMAT_VERSION) if requests_max >= 1 else ("earlier", FORMAT_VERSION - 1)
    )
    if is_done:
        assert set(lives.kept) == {INVENTORY, TABLE, "slab-1"}
    file.close()


def test_a_table_of_a_later_build_is_let_go_of(lives: Lives) -> None:
    file = InventoryFile()
    file.write(Inventory(GENERATION, FORMAT_VERSION + 1, 16, sets=(set_of(1),), table="later"))
    for name, fd in ((INVENTORY, file.fd), ("later", lives.table.fd), ("slab-1", lives.slab)):
        MemoryParking(lives.kept).park(name, fd)
    keeper = lives.keeper()
    assert keeper.former is None
    keeper.begin(GENERATION + 1, lives.table.fd, hold_seconds=65.0)
    assert set(lives.kept) == {INVENTORY, TABLE}
    keeper.close()
    file.close()


def test_memory_whose_taking_over_ends_each_life_is_let_go_of(lives: Lives) -> None:
    lives.begin().close()
    for _ in range(TRIES_MAX):
        assert lives.found() is not None
        lives.begin().close()
    assert lives.found() is None


def test_a_life_that_ends_before_it_has_begun_to_keep_counts_as_a_try(lives: Lives) -> None:
    lives.begin().close()
    for _ in range(TRIES_MAX):
        keeper = lives.keeper()
        keeper.begin_taking_over()
        keeper.close()
    assert lives.found() is None


def test_a_taking_over_that_ended_counts_no_more(lives: Lives) -> None:
    lives.begin().close()
    for _ in range(2 * TRIES_MAX):
        keeper = lives.begin()
        keeper.end_taking_over()
        keeper.close()
    assert lives.found() is not None


def test_what_no_inventory_names_goes_back(lives: Lives) -> None:
    MemoryParking(lives.kept).park("slab-9", lives.slab)
    keeper = lives.begin()
    assert set(lives.kept) == {INVENTORY, TABLE}
    keeper.close()


def test_a_start_that_is_refused_changes_nothing(lives: Lives) -> None:
    lives.begin().close()
    before = dict(lives.kept)
    keeper = lives.keeper()
    assert keeper.former is not None
    close_all([keeper.former.inventory_fd, keeper.former.table_fd])
    keeper.close()
    assert lives.kept == before


def fail_at_set(lives: Lives, keeper: Keeper) -> None:
    keeper.keep_set(set_of(1), [lives.slab])


def fail_at_process(lives: Lives, keeper: Keeper) -> None:
    keeper.keep_process("process-1", lives.slab)


@pytest.mark.parametrize("act", [fail_at_set, fail_at_process])
def test_a_place_that_fails_leaves_nothing_to_be_believed(
    lives: Lives, act: Callable[[Lives, Keeper], None]
) -> None:
    place = MemoryParking(lives.kept)
    keeper = Keeper(place)
    keeper.begin(GENERATION, lives.table.fd, hold_seconds=65.0)
    place.error = ParkingFailed("gone")
    act(lives, keeper)
    assert not keeper.is_on
    keeper.note_sessions([session(3)])
    keeper.close()
    assert lives.found() is None


def test_descriptors_are_neither_leaked_nor_closed_twice(lives: Lives) -> None:
    before = len(os.listdir("/proc/self/fd"))
    keeper = lives.begin()
    keeper.keep_set(set_of(1), [lives.slab])
    keeper.close()
    assert len(os.listdir("/proc/self/fd")) == before + len(lives.kept)


@pytest.mark.parametrize("length_bytes", [0, 4096 + 128, PAGESIZE])
def test_a_slot_table_of_another_length_than_its_slots_is_let_go_of(
    lives: Lives, length_bytes: int
) -> None:
    """A later life would take what is missing for slots that nobody uses, or not start at all."""
    keeper = lives.begin()
    keeper.keep_set(replace(set_of(1), slot_count=PAGESIZE // ENTRY_BYTES + 1), [lives.slab])
    keeper.close()
    assert lives.found() is not None
    other = create_memfd("other", length_bytes)
    MemoryParking(lives.kept).park(TABLE, other)
    os.close(other)
    assert lives.found() is None


def test_an_inventory_that_is_no_memory_is_let_go_of(lives: Lives) -> None:
    lives.begin().close()
    ends = os.pipe()
    MemoryParking(lives.kept).park(INVENTORY, ends[0])
    close_all(list(ends))
    assert lives.found() is None


@pytest.mark.parametrize("seed", range(20))
def test_a_garbled_inventory_is_one_that_was_written_or_none(lives: Lives, seed: int) -> None:
    chance = random.Random(seed)
    file = InventoryFile()
    written = [Inventory(GENERATION, 1, slot, sets=(set_of(1),)) for slot in range(2)]
    for one in written:
        file.write(one)
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(2) * HALF_BYTES + chance.randrange(600)
        os.pwrite(file.fd, chance.randbytes(chance.randint(1, 8)), at)
    found = read_inventory(file.fd)
    assert isinstance(found, str) or found in written
    file.close()


def test_a_table_is_converted_where_there_are_sets_and_is_void_elsewhere(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_versions, "CONVERTERS", {FORMAT_VERSION - 1: lambda found: found})
    one = set_of(2)
    for slot in (0, one.slot_first, one.slot_first + 1):
        lives.table.write_reserved(np.array([slot], np.uint32), None)
    file = InventoryFile()
    file.write(Inventory(GENERATION, FORMAT_VERSION - 1, 32, sets=(one,), table="earlier"))
    for name, fd in ((INVENTORY, file.fd), ("earlier", lives.table.fd)):
        MemoryParking(lives.kept).park(name, fd)
    keeper = lives.keeper()
    assert keeper.former is not None
    words = read_entries(keeper.former.table_fd, range(32)).view(np.uint64).reshape(32, -1)
    assert np.flatnonzero(words[:, 0]).tolist() == [one.slot_first, one.slot_first + 1]
    close_all([keeper.former.inventory_fd, keeper.former.table_fd, file.fd])
    keeper.close()


def test_where_nobody_keeps_memory_no_names_of_processes_are_kept() -> None:
    keeper = Keeper()
    keeper.keep_process("process-0", 0)
    tracemalloc.start()
    try:
        for number in range(1, 2_000):
            keeper.keep_process(f"process-{number}", 0)
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept_bytes < 2_000  # A byte a session.
