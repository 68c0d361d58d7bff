"""An encrypted pool over memory: what lies on it, what is refuted, how keys change."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtier.io.driver import Outcome
from kvtier.layout import SlotLayout
from kvtier.pools.key_file import Key
from kvtier.pools.nvme import MakeSealer
from kvtier.pools.nvme_recovery import RecoveredBlocks
from kvtier.pools.sealing import Sealer
from kvtier.pools.segment_headers import HEADER
from kvtier.pools.slot_table import ENTRY, ENTRY_BYTES, entry_crcs
from kvtier.pools.superblock import HEADERS_FIRST
from tests.support.crashing_file import CrashingDriver, CrashingFile
from tests.support.forms import rounds, state_finding
from tests.support.nvme_pools import (
    EPOCH,
    LARGE,
    LENGTH_BYTES,
    SHARDED,
    SMALL,
    BookedPool,
    demote,
    fingerprint_of,
    hash_of,
    is_right,
    make_drivers,
    payload_of,
    promote,
)

NAMES = [f"block{number}" for number in range(40)]
EPOCHS = {fingerprint_of("ns"): EPOCH, fingerprint_of("other"): EPOCH}
OLD, NEW = Key(1, b"o" * 32), Key(2, b"n" * 32)


def sealer_of(*keys: Key) -> MakeSealer:
    return lambda generation: Sealer(keys, generation)


def life(drivers: list[CrashingDriver], *keys: Key) -> tuple[BookedPool, RecoveredBlocks]:
    """New drivers over the same files, as after a restart."""
    again = [CrashingDriver(driver.file, driver.name) for driver in drivers]
    pool = BookedPool(again, make_sealer=sealer_of(*keys) if keys else None)
    return pool, pool.recover(EPOCHS)


def hits(
    pool: BookedPool, found: RecoveredBlocks, names: list[str], layout: SlotLayout
) -> list[str]:
    """Which of them come back right; what comes back wrong is a failure."""
    by_hash = {bytes(block): slot for block, slot in zip(found.hashes, found.slots, strict=True)}
    right = []
    for name in names:
        slot = by_hash.get(hash_of(name))
        if slot is None or pool.header_of(slot).layout.shard_bytes != layout.shard_bytes:
            continue
        [outcome], [views] = promote(pool, np.array([slot], np.uint32), layout)
        if outcome is Outcome.DONE:
            assert is_right(views, hash_of(name), layout), f"wrong bytes of {name}"
            right.append(name)
    return right


def contents(file: CrashingFile) -> bytes:
    whole = np.zeros(file.length_bytes, np.uint8)
    file.read(0, whole)
    return whole.tobytes()


def filled(
    layout: SlotLayout = SMALL, *, keys: tuple[Key, ...] = (OLD,), path_count: int = 1
) -> list[CrashingDriver]:
    """Closed in order, all of NAMES in it."""
    drivers = make_drivers(path_count)
    pool, _ = life(drivers, *keys)
    slots, _ = demote(pool, NAMES, layout=layout)
    assert len(slots) == len(NAMES)
    assert pool.close(clean=True)
    return drivers


@pytest.mark.parametrize("path_count", [1, 3])
@pytest.mark.parametrize("layout", [SMALL, LARGE, SHARDED])
def test_every_block_comes_back_after_a_restart(path_count: int, layout: SlotLayout) -> None:
    drivers = filled(layout, path_count=path_count)
    pool, found = life(drivers, OLD)
    assert hits(pool, found, NAMES, layout) == NAMES
    assert pool.book.check_invariants() == []


@pytest.mark.parametrize("keys", [(OLD,), ()])
def test_nothing_of_a_block_is_found_on_the_disk(keys: tuple[Key, ...]) -> None:
    """Of bytes, hashes and checksums; without a key all of them are, or the search is blind."""
    drivers = filled(SHARDED, keys=keys)
    disk = contents(drivers[0].file)
    pool, found = life(drivers, *keys)
    for name in NAMES:
        shards = payload_of(hash_of(name), SHARDED)
        pieces = [bytes(shard[at : at + 16]) for shard in shards for at in (0, 2000, 4081)]
        for piece in [*pieces, hash_of(name)]:
            assert (piece in disk) == (not keys)
    for checksum in pool.checksums(found.slots):
        assert (checksum.tobytes() in disk) == (not keys)


def test_two_equal_blocks_do_not_look_alike() -> None:
    drivers = make_drivers()
    pool, _ = life(drivers, OLD)
    slots, _ = demote(pool, ["same"])
    again, _ = demote(pool, ["same"])
    geometry = pool.geometry
    disk = contents(drivers[0].file)
    first, second = (
        disk[geometry.segments_first + row * pool.header_of(row).layout.slot_bytes :][:4000]
        for row in (int(slots[0]), int(again[0]))
    )
    assert first != second


@pytest.mark.full_form
def test_a_bit_that_flips_anywhere_is_a_miss_or_of_no_effect() -> None:
    """In entries, headers, payloads and seals; the CRC is made right again, as by an attacker."""
    drivers = filled(SHARDED)
    chance = random.Random(1)
    before = contents(drivers[0].file)
    pool, found = life(drivers, OLD)
    assert hits(pool, found, NAMES, SHARDED) == NAMES
    geometry = pool.geometry
    rows = [(int(slot) // 32, int(slot) % 32) for slot in found.slots[: len(NAMES)]]
    miss_count = 0
    flip_count = rounds(short=20, full=2000)
    for _ in range(flip_count):
        disk = bytearray(before)
        segment, row = chance.choice(rows)
        slot_bytes = pool.header_of(segment * 32).layout.slot_bytes
        entry_at = geometry.table_first + segment * geometry.table_segment_bytes + row * ENTRY_BYTES
        payload_at = geometry.segments_first + segment * geometry.segment_bytes + row * slot_bytes
        header_at = HEADERS_FIRST + segment * ENTRY_BYTES
        at, length = chance.choice([(entry_at, 124), (payload_at, slot_bytes), (header_at, 64)])
        disk[at + chance.randrange(length)] ^= 1 << chance.randrange(8)
        for place, kind in ((entry_at, ENTRY), (header_at, HEADER)):
            whole = np.frombuffer(disk[place : place + ENTRY_BYTES], kind).copy()
            whole["crc"] = entry_crcs(whole)
            disk[place : place + ENTRY_BYTES] = whole.tobytes()
        file = CrashingFile(LENGTH_BYTES)
        file.write(0, np.frombuffer(bytes(disk), np.uint8))
        again, seen = life([CrashingDriver(file, "path0")], OLD)
        right = hits(again, seen, NAMES, SHARDED)
        miss_count += len(right) < len(NAMES)
    state_finding(f"{flip_count} flips, {miss_count} of them a miss or more, none a wrong byte")
    assert miss_count >= flip_count // 2, "hardly a flip hit anything"


@pytest.mark.parametrize("moved", ["entries", "payloads", "both"])
def test_what_is_moved_to_another_slot_is_a_miss(moved: str) -> None:
    """Whole, and with right CRCs."""
    drivers = filled()
    pool, found = life(drivers, OLD)
    geometry = pool.geometry
    disk = bytearray(contents(drivers[0].file))
    slot_bytes = pool.header_of(int(found.slots[0])).layout.slot_bytes
    table, first = geometry.table_first, geometry.segments_first
    places = {"entries": (table, ENTRY_BYTES), "payloads": (first, slot_bytes)}
    for start, length in places.values() if moved == "both" else [places[moved]]:
        one, two = disk[start : start + length], disk[start + length : start + 2 * length]
        disk[start : start + 2 * length] = two + one
    file = CrashingFile(LENGTH_BYTES)
    file.write(0, np.frombuffer(bytes(disk), np.uint8))
    again, seen = life([CrashingDriver(file, "path0")], OLD)
    gone = [bytes(block) for block in found.hashes[found.slots < 2]]
    expected = [name for name in NAMES if hash_of(name) not in gone]
    assert hits(again, seen, NAMES, SMALL) == expected
    assert len(expected) == len(NAMES) - 2


@pytest.mark.parametrize("keys", [(), (NEW,), (Key(1, b"x" * 32),)])
def test_another_key_or_none_opens_nothing(keys: tuple[Key, ...]) -> None:
    pool, found = life(filled(), *keys)
    assert len(found.slots) == 0
    slots, _ = demote(pool, ["later"])
    assert len(slots) == 1, "the pool is of use all the same"
    assert promote(pool, slots)[0] == [Outcome.DONE]


def test_blocks_without_a_seal_do_not_count_where_there_is_a_key() -> None:
    pool, found = life(filled(keys=()), OLD)
    assert len(found.slots) == 0
    assert pool.locked_count > 0


def test_a_key_changes_without_a_loss_and_goes_with_its_blocks() -> None:
    drivers = filled()
    pool, found = life(drivers, NEW, OLD)
    assert hits(pool, found, NAMES, SMALL) == NAMES
    later = [f"later{number}" for number in range(5)]
    slots, _ = demote(pool, later)
    assert {pool.header_of(slot).key_id for slot in slots.tolist()} == {NEW.id}
    assert pool.close(clean=True)
    pool, found = life(drivers, NEW, OLD)
    assert hits(pool, found, NAMES + later, SMALL) == NAMES + later
    assert pool.close(clean=True)
    pool, found = life(drivers, NEW)
    assert hits(pool, found, NAMES + later, SMALL) == later


def test_a_segment_bound_anew_takes_its_former_entries_along() -> None:
    """Also where the former life was sealed with a key that is gone."""
    drivers = filled()
    pool, _ = life(drivers, NEW)
    total = pool.book.segment_count * 7
    names = [f"b{number}" for number in range(total)]
    slots, _ = demote(pool, names)
    assert pool.close(clean=True)
    pool, found = life(drivers, NEW, OLD)
    kept = names[: len(slots)]
    assert sorted(hits(pool, found, kept, SMALL)) == sorted(kept)
    assert hits(pool, found, NAMES, SMALL) == []


def test_a_table_written_twice_reads_the_same() -> None:
    """Entries keep their nonce, so they must keep what they say."""
    drivers = make_drivers()
    pool, _ = life(drivers, OLD)
    demote(pool, NAMES[:1])
    pool.write_table()
    before = contents(drivers[0].file)
    demote(pool, NAMES[1:2])
    pool.write_table()
    geometry = pool.geometry
    at = slice(geometry.table_first, geometry.table_first + ENTRY_BYTES)
    assert contents(drivers[0].file)[at] == before[at]
    assert before[at] != bytes(ENTRY_BYTES)
