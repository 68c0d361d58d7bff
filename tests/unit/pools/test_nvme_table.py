"""Pages of the slot table that lie side by side are written together, and marked together again."""

from __future__ import annotations

import numpy as np

from kvtier.io.driver import Outcome
from kvtier.pools.nvme import NvmePool
from kvtier.pools.nvme_paths import format_drivers
from kvtier.pools.slot_table import Slots
from kvtier.pools.superblock import Geometry
from tests.support.crashing_file import CrashingDriver, CrashingFile, Fault, FaultyDriver

ROWS_A_PAGE = 32
LENGTH_BYTES = 4 << 20


def pools_of(path_count: int = 1) -> tuple[NvmePool, list[FaultyDriver], dict[int, Fault]]:
    faults: dict[int, Fault] = {}
    drivers = [
        FaultyDriver(CrashingDriver(CrashingFile(LENGTH_BYTES), f"path{number}"), faults)
        for number in range(path_count)
    ]
    format_drivers(
        drivers,
        LENGTH_BYTES,
        pool_id=b"p" * 16,
        generation=7,
        segment_bytes=4 * ROWS_A_PAGE * 4096,
        row_count_max=4 * ROWS_A_PAGE,
    )
    pool = NvmePool(drivers)
    pool.recover(None)
    return pool, drivers, faults


def pages(*numbers: int) -> Slots:
    """A slot on each of these pages."""
    return np.array([number * ROWS_A_PAGE for number in numbers], np.uint32)


def test_neighbours_go_in_one_access_which_ends_with_the_segment() -> None:
    pool, [driver], _ = pools_of()
    assert pool.geometry.row_count_max == 4 * ROWS_A_PAGE
    before = driver.access_count
    pool.write_gone(pages(6, 2, 1, 3, 4, 5))  # Of segments 0 and 1.
    batch = pool.write_table()
    assert batch is not None
    assert driver.access_count == before + 2
    assert pool.table_written_bytes == 6 * 4096


def test_segments_of_two_paths_are_not_neighbours() -> None:
    pool, drivers, _ = pools_of(2)
    before = [driver.access_count for driver in drivers]
    pool.write_gone(pages(3, 4))
    pool.write_table()
    assert [driver.access_count for driver in drivers] == [count + 1 for count in before]


def test_all_pages_of_a_write_that_failed_are_written_again() -> None:
    pool, [driver], faults = pools_of()
    pool.write_gone(pages(0, 1, 2, 8))
    faults[driver.access_count] = Fault.SHORT  # What ends no pool.
    batch = pool.write_table()
    assert batch is not None
    assert batch.outcomes == [Outcome.SHORT, Outcome.DONE]
    assert pool.dirty_page_count == 4, "not confirmed until the next call looks"
    again = pool.write_table()
    assert again is not None
    assert pool.dirty_page_count == 3
    assert pool.table_written_bytes == (4 + 3) * 4096


def test_what_lies_on_the_disk_is_what_the_table_says() -> None:
    pool, [driver], _ = pools_of()
    geometry: Geometry = pool.geometry
    image = pool._image
    words = image.table._words
    words[: 10 * ROWS_A_PAGE] = np.arange(words.shape[1] * 10 * ROWS_A_PAGE).reshape(-1, 16)
    image.mark(pages(*range(10)))
    pool.write_table()
    for segment in range(3):
        first = segment * geometry.row_count_max
        count = min(geometry.row_count_max, 10 * ROWS_A_PAGE - first)
        found = np.zeros(count * 128, np.uint8)
        place = geometry.table_first + segment * geometry.table_segment_bytes
        driver._driver.file.read(place, found)
        assert (found.view(np.uint64).reshape(-1, 16) == words[first : first + count]).all()
