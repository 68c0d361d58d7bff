"""What a former life's slot table says: chains, whose slots are being filled, what is free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvtier.pools.adopted import AdoptedSlots, adopted_slots
from kvtier.pools.chains import ROOT
from kvtier.pools.slot_table import BlockFacts, SlotTable
from kvtier.types import BlockHash, EngineId

GENERATION, EPOCH = 5, 77
ONE, OTHER = b"\1" * 16, b"\2" * 16
ENGINE = EngineId(b"e" * 16)
ADOPTED = [range(32), range(64, 96)]


def block(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(16, b"."))


def numbers(slots: Sequence[int]) -> np.ndarray:
    return np.array(slots, np.uint32)


@pytest.fixture
def table() -> Iterator[SlotTable]:
    table = SlotTable(GENERATION, grow_slots=128)
    yield table
    table.close()


def write(
    table: SlotTable, fingerprint: bytes, path: str, slots: Sequence[int], *, sequence: int = 1
) -> None:
    hashes = [block(path[: count + 1]) for count in range(len(path))]
    facts = BlockFacts(fingerprint, EPOCH, 100)
    table.write_ready(
        numbers(slots), hashes, [None, *hashes[:-1]], facts, sequence=sequence, checksums=None
    )


def read(table: SlotTable) -> AdoptedSlots:
    return adopted_slots(
        table.read_ranges(ADOPTED), GENERATION, {ONE: EPOCH, OTHER: EPOCH}, ADOPTED
    )


def test_chains_of_each_namespace_come_parents_first(table: SlotTable) -> None:
    write(table, ONE, "abc", [9, 70, 2])
    write(table, OTHER, "xy", [1, 0], sequence=10)
    one, other = read(table).namespaces
    assert (one.chains.fingerprint, other.chains.fingerprint) == (ONE, OTHER)
    assert one.chains.lower_slots.tolist() == [9, 70, 2]
    assert one.chains.parents.tolist() == [ROOT, 0, 1]
    assert other.chains.lower_slots.tolist() == [1, 0]


def test_what_is_outside_the_adopted_ranges_is_nothing(table: SlotTable) -> None:
    write(table, ONE, "abc", [3, 40, 5])
    found = read(table)
    assert found.namespaces[0].chains.lower_slots.tolist() == [3]
    assert set(found.free.tolist()) == {*ADOPTED[0], *ADOPTED[1]} - {3, 5}


def test_a_daemons_own_reservations_are_free_and_an_engines_are_not(table: SlotTable) -> None:
    table.write_reserved(numbers([4, 5]), None)
    table.write_reserved(numbers([6, 64, 50]), ENGINE)
    found = read(table)
    assert {engine: slots.tolist() for engine, slots in found.reserved.items()} == {
        bytes(ENGINE): [6, 64]
    }
    assert {4, 5} <= set(found.free.tolist())
    assert not {6, 64} & set(found.free.tolist())


def test_a_torn_entry_is_neither_a_block_nor_free(table: SlotTable) -> None:
    write(table, ONE, "ab", [0, 1])
    torn = np.frombuffer(b"\0\1" * 64, np.uint8).view(np.uint64)
    table._words[0] = torn
    found = read(table)
    assert [len(one.chains.lower_slots) for one in found.namespaces] in ([], [0])
    assert 0 not in found.free


def test_only_checksums_in_the_table_count_as_computed(table: SlotTable) -> None:
    write(table, ONE, "abc", [8, 3, 5])
    table.write_checksums(numbers([3]), np.array([12], np.uint64))
    (one,) = read(table).namespaces
    assert one.are_summed.tolist() == [False, True, False]


def test_sequences_go_on_above_those_of_the_adopted_slots(table: SlotTable) -> None:
    write(table, ONE, "ab", [4, 70], sequence=500)
    assert read(table).sequence_next == 502


def test_a_set_that_is_not_adopted_does_not_outbid_one_that_is(table: SlotTable) -> None:
    write(table, ONE, "a", [4])
    write(table, ONE, "a", [40], sequence=500)
    assert read(table).namespaces[0].chains.lower_slots.tolist() == [4]
