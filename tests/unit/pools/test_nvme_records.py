"""What an NVMe pool does when the disk keeps a part of the pool's own records from it."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.io.driver import Outcome
from kvtier.pools import nvme_recovery
from kvtier.pools.nvme import NvmePool, PoolCondition, PoolState
from tests.support.crashing_file import CrashingDriver, Fault, FaultyDriver
from tests.support.nvme_pools import (
    EPOCH,
    BookedPool,
    demote,
    fingerprint_of,
    make_drivers,
    opened,
    promote,
)

NAMES = [f"block{number}" for number in range(3 * 16)]  # Three segments.
EPOCHS = {fingerprint_of("ns"): EPOCH}
HEADERS, TABLE = 1, 3  # Accesses of a recovery: one for the headers, one a segment that is in use.


def recovering(
    inner: CrashingDriver, *faulty: int, fault: Fault = Fault.EIO
) -> tuple[BookedPool, list[PoolCondition], list[int]]:
    """Opened again; these accesses of `recover`, counted from 0, fail. And the slots found."""
    told: list[PoolCondition] = []
    pool = BookedPool([CrashingDriver(inner.file, inner.name)], on_condition=told.append)
    pool._drivers = [FaultyDriver(pool._drivers[0], dict.fromkeys(faulty, fault))]
    found = pool.recover(EPOCHS)
    return pool, told, found.slots.tolist()


def written() -> tuple[CrashingDriver, list[int]]:
    """A pool that was closed in order, and its slots."""
    [inner] = make_drivers()
    pool = opened([inner])
    slots, _ = demote(pool, NAMES)
    assert pool.close(clean=True, recency=slots)
    return inner, slots.tolist()


def test_part_of_the_table_that_cannot_be_read_costs_the_blocks_in_it_only() -> None:
    inner, slots = written()
    pool, told, found = recovering(inner, HEADERS + 1)
    assert found == slots[:16] + slots[32:]
    assert promote(pool, np.array(found, np.uint32))[0] == [Outcome.DONE] * 32
    [condition] = told
    assert condition.state is PoolState.READ_ONLY, "what was not read must not be written over"
    assert "1 segments" in condition.reason
    assert sorted(recovering(inner)[2]) == slots, "nothing on the disk has changed"


def test_table_of_which_nothing_can_be_read_is_told() -> None:
    inner, _ = written()
    with pytest.raises(nvme_recovery.TableUnreadable):
        recovering(inner, *range(HEADERS, HEADERS + TABLE))


def test_disk_that_goes_away_during_recovery_is_told_at_once() -> None:
    inner, _ = written()
    with pytest.raises(nvme_recovery.TableUnreadable, match="went away"):
        recovering(inner, HEADERS + 1, fault=Fault.GONE)


def test_path_of_which_no_superblock_can_be_read_is_refused_as_such() -> None:
    inner, _ = written()
    faulty = FaultyDriver(inner, {0: Fault.EIO, 1: Fault.EIO})
    with pytest.raises(ConfigError, match="path0 cannot be read"):
        NvmePool([faulty])


def test_tool_is_told_of_any_part_that_cannot_be_read() -> None:
    inner, _ = written()
    pool = NvmePool([CrashingDriver(inner.file, inner.name)], writable=False)
    pool._drivers = [FaultyDriver(pool._drivers[0], {HEADERS + 1: Fault.EIO})]
    with pytest.raises(nvme_recovery.TableUnreadable):
        pool.recover(None)


def test_order_of_use_that_cannot_be_read_costs_no_block() -> None:
    inner, slots = written()
    pool, told, found = recovering(inner, HEADERS + TABLE)
    assert found == slots
    assert not told
    assert pool.condition.state is PoolState.ON


@pytest.mark.timeout(20)
def test_close_ends_though_the_disk_takes_no_page_of_the_table() -> None:
    [inner] = make_drivers()
    pool = opened([inner])
    demote(pool, NAMES[:2])
    pool._image._drivers = [FaultyDriver(inner, dict.fromkeys(range(1000), Fault.SHORT))]
    assert not pool.close(clean=True)
    assert inner.is_closed


def test_close_tries_again_what_the_disk_did_not_take_at_first() -> None:
    [inner] = make_drivers()
    pool = opened([inner])
    slots, _ = demote(pool, NAMES)
    pool._image._drivers = [FaultyDriver(inner, {0: Fault.SHORT})]
    assert pool.close(clean=True)
    assert recovering(inner)[2] == slots.tolist()
