"""The table's bytes are the format's, it grows without losing entries, and withdrawn pages go."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.pools.slot_table import (
    ENTRY,
    ENTRY_BYTES,
    BlockFacts,
    SlotTable,
    entry_crcs,
    right_crcs,
    store_entries,
)
from kvtier.types import BlockHash, EngineId
from tests.support.memory_pool import pack_entry

GENERATION = 0xFEDCBA9876543210
FINGERPRINT = bytes(range(100, 116))
FACTS = BlockFacts(FINGERPRINT, epoch=9, payload_bytes=1 << 33)
STEP = mmap.PAGESIZE // 128 * 2  # Two pages of entries.


@pytest.fixture
def table() -> Iterator[SlotTable]:
    table = SlotTable(GENERATION, grow_slots=STEP)
    yield table
    table.close()


def slots_of(*slots: int) -> np.ndarray:
    return np.array(slots, np.uint32)


def entry_bytes(table: SlotTable, slot: int) -> bytes:
    return table.entries(slot, 1).tobytes()


def write_one(table: SlotTable, slot: int, block: bytes = b"h" * 32) -> None:
    table.write_ready(slots_of(slot), [BlockHash(block)], [None], FACTS, sequence=slot)


def test_a_ready_entry_has_the_bytes_of_the_format(table: SlotTable) -> None:
    block, parent = BlockHash(b"b" * 20), BlockHash(b"p" * 20)
    table.write_ready(slots_of(3), [block], [parent], FACTS, sequence=1 << 40)
    table.write_checksums(slots_of(3), np.array([0xABCDEF0123456789], np.uint64))
    assert entry_bytes(table, 3) == pack_entry(
        state=2,
        generation=GENERATION,
        hash_bytes=20,
        fingerprint=FINGERPRINT,
        block=block,
        parent=parent,
        sequence=1 << 40,
        payload_bytes=1 << 33,
        checksum=0xABCDEF0123456789,
        epoch=9,
    )


def test_a_reserved_entry_has_the_bytes_of_the_format(table: SlotTable) -> None:
    engine = EngineId(b"e" * 16)
    table.write_reserved(slots_of(0), engine)
    assert entry_bytes(table, 0) == pack_entry(state=1, generation=GENERATION, block=engine)


def test_a_gone_entry_is_zero(table: SlotTable) -> None:
    write_one(table, 2)
    table.write_gone(slots_of(2))
    assert entry_bytes(table, 2) == bytes(128)


def test_writing_nothing_changes_nothing(table: SlotTable) -> None:
    none = slots_of()
    table.write_ready(none, [], [], FACTS, sequence=1)
    table.write_reserved(none, None)
    table.write_gone(none)
    assert table.write_checksums(none, np.array([], np.uint64)) == 0
    assert not table.entries(0, table.slot_count).view(np.uint8).any()


def test_hashes_of_unequal_length_are_our_own_mistake_and_change_nothing(table: SlotTable) -> None:
    hashes = [BlockHash(b"a" * 32), BlockHash(b"b" * 31)]
    with pytest.raises(AssertionError, match="unequal length"):
        table.write_ready(slots_of(0, 1), hashes, [None, None], FACTS, sequence=1)
    assert not table.entries(0, 2).view(np.uint8).any()


def test_growing_keeps_every_entry(table: SlotTable) -> None:
    for slot in range(STEP):
        write_one(table, slot)
    before = table.entries(0, STEP).tobytes()
    table.extend(3 * STEP + 1)
    assert table.slot_count == 4 * STEP
    assert table.entries(0, STEP).tobytes() == before
    write_one(table, 4 * STEP - 1)
    assert table.entries(4 * STEP - 1, 1)["sequence"].tolist() == [4 * STEP - 1]


def test_a_withdrawn_range_is_empty_and_its_pages_are_given_back(table: SlotTable) -> None:
    table.extend(3 * STEP)
    for slot in range(3 * STEP):
        write_one(table, slot)
    kept = table.entries(0, STEP - 1).tobytes()
    pages_before = os.fstat(table.fd).st_blocks * 512 // mmap.PAGESIZE
    table.withdraw(STEP - 1, STEP + 2)  # One entry beyond the two pages on either side.
    # Asked first: reading a hole through a mapping fills it.
    assert os.fstat(table.fd).st_blocks * 512 // mmap.PAGESIZE == pages_before - 2
    assert not table.entries(STEP - 1, STEP + 2).view(np.uint8).any()
    assert table.entries(0, STEP - 1).tobytes() == kept
    assert table.entries(2 * STEP + 1, 1)["state"].tolist() == [2]


class DyingWords(np.ndarray):
    """A table whose writer is killed before its n-th store."""

    stores_left = 0

    def __setitem__(self, key, value):
        if self.stores_left == 0:
            raise KeyboardInterrupt
        self.stores_left -= 1
        super().__setitem__(key, value)


@pytest.mark.parametrize("stores", [1, 2])
def test_an_entry_has_no_head_before_the_rest_of_it_is_there(stores: int) -> None:
    """Even if the CRC were blind."""
    old = pack_entry(state=2, generation=GENERATION, block=b"old")
    new = np.frombuffer(pack_entry(state=2, generation=GENERATION, block=b"new"), np.uint8)
    words = np.frombuffer(bytearray(old), np.uint64).reshape(1, 16).view(DyingWords)
    words.stores_left = stores
    with pytest.raises(KeyboardInterrupt):
        store_entries(words, slots_of(0), new.view("V128"))
    assert words.tobytes()[:8] == bytes(8)


def sound_entries(count: int) -> np.ndarray:
    entries = np.frombuffer(np.random.default_rng(5).bytes(count * ENTRY_BYTES), ENTRY).copy()
    entries["crc"] = entry_crcs(entries)
    return entries


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 3000])
def test_right_crcs_are_right_however_many(count: int) -> None:
    assert right_crcs(sound_entries(count)).tolist() == [True] * count


@pytest.mark.parametrize("wrong", [[0], [1023], [1024], [2999], [5, 6], [7, 1030, 2500]])
def test_wrong_entries_among_right_ones_are_told_one_by_one(wrong: list[int]) -> None:
    entries = sound_entries(3000)
    entries["payload_bytes"][wrong] ^= 1 << 17  # The same bit in each.
    assert np.flatnonzero(~right_crcs(entries)).tolist() == wrong


def test_one_flipped_bit_in_a_large_table_is_found() -> None:
    entries = sound_entries(1024)
    raw = entries.view(np.uint8)
    for place in range(0, 1024 * ENTRY_BYTES, 3001):
        raw[place] ^= 1 << place % 8
        assert np.flatnonzero(~right_crcs(entries)).tolist() == [place // ENTRY_BYTES]
        raw[place] ^= 1 << place % 8


@pytest.mark.parametrize(
    "slots",
    [
        [],
        [7],
        list(range(STEP)),
        list(range(3, STEP - 5)),
        [*range(40), *range(50, STEP)],
        list(range(0, STEP, 2)),
    ],
)
def test_adopted_entries_stand_where_they_were_and_nothing_else_changes(
    table: SlotTable, slots: list[int]
) -> None:
    table.adopt(slots_of(*slots), sound_entries(STEP)[slots])
    expected = np.zeros(STEP, ENTRY)
    expected[slots] = sound_entries(STEP)[slots]
    assert table.entries(0, STEP).tobytes() == expected.tobytes()
    assert table.read_bytes().tobytes() == expected.tobytes()
