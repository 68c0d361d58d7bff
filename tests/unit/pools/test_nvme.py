from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.io.driver import Outcome
from kvtier.layout import SegmentHeader, SlotLayout
from kvtier.pools import nvme_recovery
from kvtier.pools.nvme import NvmePool, PoolCondition, PoolState
from kvtier.pools.nvme_paths import format_drivers
from kvtier.pools.slot_table import ENTRY, entry_crcs
from tests.support.crashing_file import CrashingDriver, CrashingFile, Fault, FaultyDriver
from tests.support.nvme_pools import (
    EPOCH,
    GENERATION,
    LARGE,
    LENGTH_BYTES,
    POOL_ID,
    ROW_COUNT_MAX,
    SEGMENT_BYTES,
    SHARDED,
    SMALL,
    BookedPool,
    checksums_of,
    demote,
    empty_views,
    filled_views,
    fingerprint_of,
    hash_of,
    is_right,
    make_drivers,
    opened,
    promote,
)

NAMES = [f"block{number}" for number in range(40)]
EPOCHS = {fingerprint_of("ns"): EPOCH, fingerprint_of("other"): EPOCH}


def reopened(drivers: list[CrashingDriver]) -> tuple[BookedPool, nvme_recovery.RecoveredBlocks]:
    """As after a restart: new drivers over the same files."""
    pool = BookedPool([CrashingDriver(driver.file, driver.name) for driver in drivers])
    return pool, pool.recover(EPOCHS)


@pytest.mark.parametrize("path_count", [1, 3])
@pytest.mark.parametrize("layout", [SMALL, LARGE, SHARDED])
def test_what_was_demoted_is_promoted_after_a_restart_too(
    path_count: int, layout: SlotLayout
) -> None:
    drivers = make_drivers(path_count)
    pool = opened(drivers)
    slots, _ = demote(pool, NAMES, layout=layout)
    assert len(slots) == len(NAMES)
    assert pool.close(clean=True)
    pool, found = reopened(drivers)
    order = {bytes(block): number for number, block in enumerate(found.hashes)}
    rows = np.array([order[hash_of(name)] for name in NAMES])
    assert found.slots[rows].tolist() == slots.tolist()
    outcomes, blocks = promote(pool, slots, layout)
    assert outcomes == [Outcome.DONE] * len(NAMES)
    assert all(
        is_right(views, hash_of(name), layout) for name, views in zip(NAMES, blocks, strict=True)
    )
    assert pool.book.check_invariants() == []


def test_the_blocks_of_a_batch_lie_on_all_paths() -> None:
    drivers = make_drivers(2)
    pool = opened(drivers)
    slots, _ = demote(pool, NAMES)
    assert sorted((slots // ROW_COUNT_MAX % 2).tolist()) == [0] * 20 + [1] * 20


def test_a_flipped_bit_is_a_miss() -> None:
    drivers = make_drivers()
    pool = opened(drivers)
    slots, _ = demote(pool, NAMES[:3])
    place = pool.geometry.segments_first + SMALL.slot_bytes + 17
    drivers[0].file.write(place, np.array([1, 2, 3], np.uint8))
    assert promote(pool, slots)[0] == [Outcome.DONE, Outcome.CORRUPT, Outcome.DONE]


def test_a_block_scribbled_over_after_its_checksum_is_not_written() -> None:
    pool = opened(make_drivers())
    blocks = [filled_views(hash_of(name), SMALL) for name in NAMES[:2]]
    checksums = checksums_of(blocks, SMALL)
    blocks[1][0][100] ^= 1
    reserved = pool.reserve(fingerprint_of("ns"), SMALL, 2)
    outcomes = pool.write_blocks(reserved.slots, blocks, checksums).wait()
    assert outcomes == [Outcome.DONE, Outcome.CORRUPT]


def test_the_table_is_written_by_dirty_pages_only() -> None:
    pool = opened(make_drivers())
    assert pool.write_table() is None
    demote(pool, NAMES[:2])
    batch = pool.write_table()
    assert batch is not None
    assert batch.count == 2, "one page of entries, one of headers"
    assert pool.dirty_page_count == 2, "not confirmed until the next call looks"
    assert pool.write_table() is None
    assert pool.dirty_page_count == 0


def test_a_page_that_could_not_be_written_stays_dirty() -> None:
    [inner] = make_drivers()
    pool = opened([inner])
    demote(pool, NAMES[:2])
    faulty = FaultyDriver(inner, {0: Fault.STALL})
    pool._image._drivers = [faulty]
    batch = pool.write_table()
    assert batch is not None
    assert pool.write_table() is None, "one at a time"
    batch.give_up()
    assert pool.write_table() is None, "given up is not returned"
    faulty.release()
    again = pool.write_table()
    assert again is not None
    assert again.count == 1


def test_a_reused_segment_takes_its_former_blocks_with_it() -> None:
    drivers = make_drivers(length_bytes=LENGTH_BYTES // 2)
    pool = opened(drivers)
    total = pool.book.segment_count * 16
    first, _ = demote(pool, [f"a{number}" for number in range(total)])
    assert len(first) == total
    _, evicted = demote(pool, ["b"], namespace="other", layout=LARGE)
    assert evicted.tolist() == first[:16].tolist()
    pool.close(clean=True)
    pool, found = reopened(drivers)
    assert len(found.slots) == total - 16 + 1
    assert not set(found.slots.tolist()) & set(evicted[1:].tolist())
    assert pool.book.check_invariants() == []


def new_life(pool: BookedPool, header: SegmentHeader) -> SegmentHeader:
    return replace(header, sequence=pool.book.take_sequences(1))


@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_new_life_of_a_segment_empties_its_rows_and_sends_only_those(is_reopened: bool) -> None:
    drivers = make_drivers()
    pool = opened(drivers)
    slots, _ = demote(pool, NAMES[:18])  # 16 in one segment, 2 in the next.
    assert pool.write_table() is not None
    assert pool.write_table() is None
    if is_reopened:
        pool, _ = reopened(drivers)
    assert all(pool.checksums(slots).tolist())
    assert pool.dirty_page_count == 0
    pool.bind([new_life(pool, pool.header_of(0))])
    assert pool.checksums(slots[:16]).tolist() == [0] * 16
    assert all(pool.checksums(slots[16:]).tolist())
    assert pool.dirty_page_count == 2, "one page of entries, one of headers"
    pool.bind([new_life(pool, pool.header_of(0))])
    assert pool.dirty_page_count == 2
    batch = pool.write_table()
    assert batch is not None
    entries = np.zeros(4096, np.uint8)
    drivers[0].file.read(pool.geometry.table_first, entries)
    assert not entries.any()


def test_a_segment_bound_for_the_first_time_has_no_rows_to_send() -> None:
    pool = opened(make_drivers())
    pool.bind([SegmentHeader(3, fingerprint_of("ns"), SMALL, 16, sequence=7)])
    assert pool.dirty_page_count == 1, "its header"
    assert pool.header_of(3 * ROW_COUNT_MAX + 5).sequence == 7
    with pytest.raises(AssertionError, match="slot 64 is in no bound segment"):
        pool.header_of(2 * ROW_COUNT_MAX)


def test_an_entry_that_its_segment_would_make_void_is_not_written() -> None:
    pool = opened(make_drivers())
    reserved = pool.reserve(fingerprint_of("ns"), SMALL, 1)
    [header] = reserved.bound
    with pytest.raises(AssertionError, match="such an entry would be void"):
        pool.write_ready(
            reserved.slots,
            [hash_of("a")],
            [None],
            np.ones(1, np.uint64),
            epoch=EPOCH,
            sequence=header.sequence,
        )
    with pytest.raises(AssertionError, match="a new life has a higher number"):
        pool.bind([header])


def test_a_batch_goes_where_its_slots_lay_when_it_began() -> None:
    [inner] = make_drivers()
    pool = opened([inner])
    faulty = FaultyDriver(inner, {0: Fault.STALL})
    pool._drivers = [faulty]
    block, names = [filled_views(hash_of("a"), SHARDED)], fingerprint_of("ns")
    pool.bind([SegmentHeader(0, names, SHARDED, 4, sequence=7)])
    slots = np.array([2], np.uint32)
    batch = pool.write_blocks(slots, block, checksums_of(block, SHARDED))
    pool.bind([SegmentHeader(0, names, SMALL, 16, sequence=8)])
    faulty.release()
    assert batch.wait() == [Outcome.DONE]
    written = np.zeros(4096, np.uint8)
    inner.file.read(pool.geometry.segments_first + 2 * SHARDED.slot_bytes, written)
    assert (written == block[0][0][:4096]).all()


def test_a_batch_has_slots_of_one_layout() -> None:
    pool = opened(make_drivers())
    small, _ = demote(pool, NAMES[:1])
    large, _ = demote(pool, NAMES[1:2], namespace="other", layout=LARGE)
    with pytest.raises(AssertionError, match="slots of one layout"):
        pool.read_blocks(np.concatenate((small, large)), [empty_views(SMALL), empty_views(LARGE)])


def test_old_entries_under_a_new_header_are_void() -> None:
    drivers = make_drivers(length_bytes=LENGTH_BYTES // 2)
    pool = opened(drivers)
    total = pool.book.segment_count * 16
    demote(pool, [f"a{number}" for number in range(total)])
    pool.write_table()
    geometry = pool.geometry
    entries = np.zeros(geometry.table_segment_bytes, np.uint8)
    drivers[0].file.read(geometry.table_first, entries)
    demote(pool, ["b"])  # The same namespace: the same fingerprint, layout and epoch.
    pool.write_table()
    pool.write_table()
    new = np.zeros(128, np.uint8)
    drivers[0].file.read(geometry.table_first, new)
    entries[:128] = new
    drivers[0].file.write(geometry.table_first, entries)  # As if that page had been lost.
    _, found = reopened(drivers)
    assert len(found.slots) == total - 16 + 1
    assert found.void_slots.tolist() == list(range(1, 16))


@pytest.mark.parametrize(
    ("field", "place"), [("fingerprint", 0), ("fingerprint", 15), ("payload_bytes", None)]
)
def test_an_entry_that_is_not_of_its_segments_life_is_void(field: str, place: int | None) -> None:
    """Sound by itself, and of an epoch that counts."""
    drivers = make_drivers()
    pool = opened(drivers)
    demote(pool, NAMES[:3])
    pool.close(clean=True)
    entries = np.zeros(3, ENTRY)
    drivers[0].file.read(pool.geometry.table_first, entries.view(np.uint8))
    entries[field][(1,) if place is None else (1, place)] ^= 1
    entries["crc"] = entry_crcs(entries)
    drivers[0].file.write(pool.geometry.table_first, entries.view(np.uint8))
    pool = BookedPool([CrashingDriver(driver.file, driver.name) for driver in drivers])
    found = pool.recover(None)
    assert (found.slots.tolist(), found.void_slots.tolist()) == ([0, 2], [1])


def test_blocks_of_another_epoch_or_an_unknown_namespace_are_not_recovered() -> None:
    drivers = make_drivers()
    pool = opened(drivers)
    demote(pool, NAMES[:3])
    demote(pool, NAMES[3:5], epoch=EPOCH + 1)
    demote(pool, NAMES[5:9], namespace="unknown")
    pool.close(clean=True)
    _, found = reopened(drivers)
    assert [bytes(block) for block in found.hashes] == [hash_of(one) for one in NAMES[:3]]
    assert len(found.void_slots) == 6


def test_of_duplicates_the_highest_sequence_counts() -> None:
    drivers = make_drivers()
    pool = opened(drivers)
    demote(pool, NAMES[:2])
    again, _ = demote(pool, NAMES[1:2])
    pool.close(clean=True)
    pool, found = reopened(drivers)
    assert found.slots.tolist() == [0, *again.tolist()]
    assert found.void_slots.tolist() == [1]
    pool.close(clean=True)
    _, found = reopened(drivers)
    assert found.void_slots.tolist() == [], "the older entry is still in the table"


def test_a_gone_block_stays_gone() -> None:
    drivers = make_drivers()
    pool = opened(drivers)
    slots, _ = demote(pool, NAMES[:3])
    pool.void(slots[1:2])
    pool.close(clean=True)
    assert reopened(drivers)[1].slots.tolist() == [0, 2]


def test_a_clean_close_keeps_the_order_of_use_and_a_crash_does_not() -> None:
    drivers = make_drivers()
    pool = opened(drivers)
    slots, _ = demote(pool, NAMES[:5])
    order = slots[[3, 0, 4, 1, 2]]
    pool.void(slots[1:2])
    assert pool.close(clean=True, recency=order)
    pool, found = reopened(drivers)
    assert pool.was_clean
    assert found.recency is not None
    assert found.recency.tolist() == [3, 0, 4, 2]
    pool, found = reopened(drivers)  # The life before ended without `close`.
    assert not pool.was_clean
    assert found.recency is None
    assert len(found.slots) == 4


def test_sequence_numbers_go_on_above_those_of_every_former_life() -> None:
    drivers = make_drivers()
    pool = opened(drivers)
    demote(pool, NAMES[:3])
    pool.close(clean=True)
    pool, found = reopened(drivers)
    assert pool.sequence_first > max(life.sequence for life, _ in found.lives) + (1 << 39)


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        (Fault.EIO, PoolState.READ_ONLY),
        (Fault.NO_SPACE, PoolState.READ_ONLY),
        (Fault.GONE, PoolState.OFF),
        (Fault.SHORT, PoolState.ON),
        (Fault.BIT_FLIP, PoolState.ON),
    ],
)
def test_a_failing_disk_is_a_value(fault: Fault, state: PoolState) -> None:
    told: list[PoolCondition] = []
    [inner] = make_drivers()
    pool = BookedPool([inner], on_condition=told.append)
    pool.recover(None)
    kept, _ = demote(pool, NAMES[:2])
    pool._drivers = [FaultyDriver(inner, {1: fault})]
    demote(pool, NAMES[2:5])
    assert pool.condition.state is state
    assert [one.state for one in told] == ([] if state is PoolState.ON else [state])
    assert len(demote(pool, NAMES[5:6])[0]) == (1 if state is PoolState.ON else 0)
    outcomes = promote(pool, kept)[0]
    assert outcomes == [Outcome.REFUSED if state is PoolState.OFF else Outcome.DONE] * 2
    assert (pool.write_table() is None) == (state is not PoolState.ON)
    assert pool.book.check_invariants() == []


def test_a_stalled_write_holds_its_segment_until_it_returns() -> None:
    [inner] = make_drivers(length_bytes=LENGTH_BYTES // 2)
    pool = opened([inner])
    faulty = FaultyDriver(inner, {0: Fault.STALL})
    pool._drivers = [faulty]
    reserved = pool.reserve(fingerprint_of("ns"), SMALL, 1)
    block = [filled_views(hash_of("late"), SMALL)]
    returned: list[bool] = []
    batch = pool.write_blocks(
        reserved.slots,
        block,
        checksums_of(block, SMALL),
        on_returned=lambda one: returned.append(one.is_returned),
    )
    assert batch.wait(0) == [Outcome.TIMED_OUT]
    others, _ = demote(pool, [f"x{number}" for number in range(500)])
    assert reserved.slots[0] not in others.tolist()
    assert not returned
    faulty.release()
    assert returned == [True]
    pool.book.abort(reserved.slots)
    assert pool.book.check_invariants() == []


def other_pool(length_bytes: int = LENGTH_BYTES) -> CrashingDriver:
    driver = CrashingDriver(CrashingFile(length_bytes), "other")
    format_drivers(
        [driver],
        length_bytes,
        pool_id=b"q" * 16,
        generation=GENERATION,
        segment_bytes=SEGMENT_BYTES,
        row_count_max=ROW_COUNT_MAX,
    )
    return driver


def test_paths_that_are_no_pool_are_refused_in_one_line() -> None:
    files = {driver.name: driver.file for driver in [*make_drivers(2), other_pool()]}
    files["blank"] = CrashingFile(LENGTH_BYTES)
    cases = [
        (["path0"], "path0 belongs to a pool of 2 paths, given are 1; missing: 2"),
        (["path1"], "path1 belongs to a pool of 2 paths, given are 1; missing: 1"),
        (["path0", "other"], "other and path0 belong to different pools"),
        (["path0", "blank"], "blank is not a pool of kvtier"),
        (["path0", "path1", "path0"], "given are 3"),
    ]
    for names, message in cases:
        drivers = [CrashingDriver(files[name], name) for name in names]
        with pytest.raises(ConfigError, match=message) as refused:
            NvmePool(drivers)
        assert "\n" not in str(refused.value)
        assert all(driver.is_closed for driver in drivers)
    NvmePool([CrashingDriver(files[name], name) for name in ("path1", "path0")])


def test_a_torn_superblock_is_replaced_by_its_copy() -> None:
    [driver] = make_drivers()
    driver.file.write(0, np.full(512, 7, np.uint8))
    pool = opened([driver])
    demote(pool, NAMES[:1])
    assert pool.close(clean=True)


def test_blocks_of_a_former_generation_are_void_after_a_format() -> None:
    drivers = make_drivers()
    pool = opened(drivers)
    demote(pool, NAMES[:5])
    pool.close(clean=True)
    again = CrashingDriver(drivers[0].file)
    format_drivers(
        [again],
        LENGTH_BYTES,
        pool_id=POOL_ID,
        generation=GENERATION + 1,
        segment_bytes=SEGMENT_BYTES,
        row_count_max=ROW_COUNT_MAX,
    )
    pool = NvmePool([again])
    assert len(pool.recover(EPOCHS).slots) == 0


def test_a_pool_opened_to_read_changes_nothing() -> None:
    drivers = make_drivers()
    pool = opened(drivers)
    slots, _ = demote(pool, NAMES[:5])
    pool.close(clean=True)
    before = drivers[0].file._seen.copy()
    reader = NvmePool([CrashingDriver(drivers[0].file)], writable=False)
    reader.recover(None)
    assert promote(reader, slots)[0] == [Outcome.DONE] * 5
    block = [filled_views(hash_of(NAMES[0]), SMALL)]
    batch = reader.write_blocks(slots[:1], block, checksums_of(block, SMALL))
    assert batch.wait() == [Outcome.REFUSED]
    reader.write_gone(slots[:1])
    assert reader.write_table() is None
    reader.close(clean=False)
    assert (drivers[0].file._seen == before).all()


def test_a_table_that_cannot_be_read_is_told() -> None:
    [inner] = make_drivers()
    pool = NvmePool([inner])
    pool._drivers = [FaultyDriver(inner, {0: Fault.EIO})]
    with pytest.raises(nvme_recovery.TableUnreadable, match="path0 cannot be read"):
        pool.recover(None)


def test_views_must_have_room_for_the_padding() -> None:
    pool = opened(make_drivers())
    slots, _ = demote(pool, NAMES[:1])
    short = [[view[:-1] for view in empty_views(SMALL)]]
    with pytest.raises(AssertionError, match="padding included"):
        pool.read_blocks(slots, short)
