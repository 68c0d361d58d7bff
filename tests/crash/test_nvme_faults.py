"""A fault at each access of a scripted run: a block is right or a miss, and the rest goes on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvtier.io.driver import Outcome
from kvtier.pools.nvme import NvmePool, PoolState
from kvtier.pools.slot_table import Slots
from tests.support.crashing_file import CrashingDriver, Fault, FaultyDriver
from tests.support.forms import is_torture
from tests.support.nvme_pools import (
    EPOCH,
    SHARDED,
    BookedPool,
    checksums_of,
    empty_views,
    filled_views,
    fingerprint_of,
    hash_of,
    is_right,
    make_drivers,
)

NAMES = [f"block{number}" for number in range(60)]
BATCH = 12
EPOCHS = {fingerprint_of("ns"): EPOCH}


@dataclass
class Script:
    """Opens, recovers, demotes, promotes and closes; what hangs is given up, and counted."""

    driver: FaultyDriver
    right_count: int = 0
    stalled_count: int = 0

    def run(self) -> BookedPool:
        pool = BookedPool([self.driver])
        pool.recover(EPOCHS)
        places: dict[str, int] = {}
        for first in range(0, len(NAMES), BATCH):
            names = NAMES[first : first + BATCH]
            self.demote(pool, names, places)
            if (batch := pool.write_table()) is not None:
                batch.give_up()
            self.promote(pool, places)
            assert pool.book.check_invariants() == []
        return pool

    def demote(self, pool: BookedPool, names: list[str], places: dict[str, int]) -> None:
        reserved = pool.reserve(fingerprint_of("ns"), SHARDED, len(names))
        evicted = set(reserved.evicted.tolist())
        for name in [name for name, slot in places.items() if slot in evicted]:
            del places[name]
        slots, names = reserved.slots, names[: len(reserved.slots)]
        blocks = [filled_views(hash_of(name), SHARDED) for name in names]
        checksums = checksums_of(blocks, SHARDED)
        batch = pool.write_blocks(slots, blocks, checksums)
        outcomes = batch.wait(0)
        if not batch.is_returned:
            self.stalled_count += 1  # Its slots stay reserved: the call may still write.
            returned = np.array([one is not Outcome.TIMED_OUT for one in outcomes], np.bool_)
        else:
            returned = np.ones(len(slots), np.bool_)
        done = np.array([one is Outcome.DONE for one in outcomes], np.bool_)
        pool.book.abort(slots[returned & ~done])
        kept = [name for name, right in zip(names, done.tolist(), strict=True) if right]
        hashes = [hash_of(name) for name in kept]
        pool.commit(slots[done], hashes, checksums[done], epoch=EPOCH)
        places.update(zip(kept, slots[done].tolist(), strict=True))

    def promote(self, pool: NvmePool, places: dict[str, int]) -> None:
        slots: Slots = np.array(list(places.values()), np.uint32)
        blocks = [empty_views(SHARDED) for _ in places]
        batch = pool.read_blocks(slots, blocks)
        for name, outcome, views in zip(places, batch.wait(0), blocks, strict=True):
            if outcome is Outcome.DONE:
                assert is_right(views, hash_of(name), SHARDED), f"wrong bytes of {name}"
                self.right_count += 1
        self.stalled_count += not batch.is_returned


def run_script(faults: dict[int, Fault]) -> tuple[Script, BookedPool, FaultyDriver]:
    [inner] = make_drivers()
    driver = FaultyDriver(inner, faults)
    script = Script(driver)
    return script, script.run(), driver


@pytest.fixture(scope="module")
def faultless() -> tuple[int, int, int]:
    """(first access behind opening, accesses, right reads) of the script without a fault."""
    script, _, driver = run_script({})
    [inner] = make_drivers()
    opening = FaultyDriver(inner, {})
    NvmePool([opening]).recover(EPOCHS)
    return opening.access_count, driver.access_count, script.right_count


@pytest.mark.full_form
@pytest.mark.parametrize("fault", list(Fault))
def test_a_fault_at_any_access_costs_what_it_hits_and_nothing_more(
    fault: Fault, faultless: tuple[int, int, int]
) -> None:
    first, access_count, right_count = faultless
    assert access_count - first > 2 * len(NAMES), "the script does too little"
    step = 1 if is_torture() else 13
    for place in range(first, access_count, step):
        script, pool, driver = run_script({place: fault})
        where = f"{fault} at access {place}"
        driver.release()
        assert pool.book.check_invariants() == [], where
        if fault in {Fault.SHORT, Fault.BIT_FLIP, Fault.STALL}:
            # One block of each later read at most; a table page is sent again.
            assert pool.condition.state is PoolState.ON, where
            assert script.right_count >= right_count - len(NAMES) // BATCH - 1, where
        again = NvmePool([CrashingDriver(driver._driver.file)])
        found = again.recover(EPOCHS)
        blocks = [empty_views(SHARDED) for _ in found.slots]
        outcomes = again.read_blocks(found.slots, blocks).wait(0)
        names = {bytes(hash_of(name)): name for name in NAMES}
        for found_hash, outcome, views in zip(found.hashes, outcomes, blocks, strict=True):
            block = hash_of(names[bytes(found_hash)])
            assert outcome is not Outcome.DONE or is_right(views, block, SHARDED), where
