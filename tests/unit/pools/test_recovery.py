"""An entry counts if and only if all of it is right; of two for one block the newer counts."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.pools.recovery import RecoveredEntries, newest_entries, recover
from kvtier.pools.slot_table import ENTRY
from tests.support.memory_pool import pack_entry

GENERATION = 5
ONE, OTHER = b"1" * 16, b"2" * 16
EPOCHS = {ONE: 10, OTHER: 20}


def ready(block: bytes, *, sequence: int = 1, **changed: int | bytes) -> bytes:
    facts = {"fingerprint": ONE, "epoch": 10, "generation": GENERATION, **changed}
    return pack_entry(state=2, hash_bytes=32, block=block, sequence=sequence, **facts)


def recovered(*entries: bytes) -> RecoveredEntries:
    return recover(np.frombuffer(b"".join(entries), np.uint8), GENERATION, EPOCHS)


def test_sound_entries_are_found_in_slot_order() -> None:
    found = recovered(bytes(128), ready(b"b"), bytes(128), ready(b"a"))
    assert found.ready_slots.tolist() == [1, 3]
    assert [bytes(one)[:1] for one in found.ready["hash"]] == [b"b", b"a"]
    assert found.void_slots.tolist() == []


@pytest.mark.parametrize(
    "entry",
    [
        ready(b"a", generation=GENERATION + 1),
        ready(b"a", epoch=11),
        ready(b"a", fingerprint=OTHER),  # The other namespace's epoch is 20.
        ready(b"a", fingerprint=b"?" * 16),
        pack_entry(state=2, hash_bytes=33, fingerprint=ONE, epoch=10, generation=GENERATION),
        pack_entry(state=3, hash_bytes=32, fingerprint=ONE, epoch=10, generation=GENERATION),
    ],
)
def test_an_entry_with_one_wrong_fact_is_void(entry: bytes) -> None:
    found = recovered(ready(b"other"), entry)
    assert found.ready_slots.tolist() == [0]
    assert found.void_slots.tolist() == [1]


@pytest.mark.parametrize("place", range(128))
def test_one_flipped_bit_anywhere_makes_an_entry_void(place: int) -> None:
    entry = bytearray(ready(b"a"))
    entry[place] ^= 0x10
    found = recovered(bytes(entry))
    assert len(found.ready) == len(found.reserved) == 0
    assert found.void_slots.tolist() == [0]


def test_each_namespace_has_its_own_epoch() -> None:
    found = recovered(ready(b"a"), ready(b"a", fingerprint=OTHER, epoch=20))
    assert found.ready_slots.tolist() == [0, 1]


def test_of_one_block_in_three_slots_the_highest_sequence_counts() -> None:
    found = recovered(ready(b"a", sequence=7), ready(b"a", sequence=9), ready(b"a", sequence=8))
    assert found.ready_slots.tolist() == [1]
    assert found.void_slots.tolist() == [0, 2]


def test_blocks_that_differ_only_in_their_last_byte_are_two() -> None:
    found = recovered(ready(b"a" * 31 + b"x"), ready(b"a" * 31 + b"y"))
    assert found.ready_slots.tolist() == [0, 1]


def test_a_stale_duplicate_does_not_win_by_a_higher_sequence() -> None:
    found = recovered(ready(b"a", sequence=1), ready(b"a", sequence=99, epoch=9))
    assert found.ready_slots.tolist() == [0]


def test_an_empty_table_and_an_unknown_pool_hold_nothing() -> None:
    assert len(recovered().ready) == 0
    found = recover(np.frombuffer(ready(b"a"), np.uint8), GENERATION, {})
    assert found.void_slots.tolist() == [0]


@pytest.mark.parametrize("seed", range(20))
def test_of_many_duplicates_the_newest_is_found_as_by_comparing_all(seed: int) -> None:
    """Blocks that begin alike in two namespaces, each in several slots."""
    chance = np.random.default_rng(seed)
    count = 300
    entries = np.zeros(count, ENTRY)
    entries["hash"][:, 0] = chance.integers(0, 3, count)
    entries["hash"][:, 31] = chance.integers(0, 20, count)
    entries["fingerprint"][:, 15] = chance.integers(0, 2, count)
    entries["sequence"] = chance.permutation(count)
    best: dict[bytes, int] = {}
    for row, entry in enumerate(entries):
        name = entry["hash"].tobytes() + entry["fingerprint"].tobytes()
        if name not in best or entries["sequence"][best[name]] < entry["sequence"]:
            best[name] = row
    assert np.flatnonzero(newest_entries(entries)).tolist() == sorted(best.values())
