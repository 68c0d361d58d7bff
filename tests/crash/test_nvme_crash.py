"""Power cuts under an NVMe pool: after each, a block that comes back is right, or it is a miss.

A scripted mixed load over memory that loses, reorders and tears what was not synced, and one child
that is killed over a real file.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvtier.io.driver import Outcome
from kvtier.layout import SlotLayout
from kvtier.pools.key_file import Key
from kvtier.pools.nvme_paths import format_paths, open_paths
from kvtier.pools.sealing import Sealer
from tests.support.crashing_file import CrashingDriver
from tests.support.forms import rounds, state_finding
from tests.support.nvme_pools import (
    EPOCH,
    GENERATION,
    LARGE,
    POOL_ID,
    ROW_COUNT_MAX,
    SEGMENT_BYTES,
    SHARDED,
    SMALL,
    BookedPool,
    demote,
    fingerprint_of,
    hash_of,
    is_right,
    make_drivers,
    promote,
)

LENGTH_BYTES = 1 << 19  # 6 segments a path.
LAYOUTS = {"small": SMALL, "large": LARGE, "sharded": SHARDED}
KEYS = (Key(1, b"k" * 32),)
EPOCHS = {fingerprint_of(name): EPOCH for name in LAYOUTS}
STEPS = 40
LIVES = 3


@dataclass
class Told:
    """What a test knows of one block that was demoted."""

    namespace: str
    slot: int


@dataclass
class Load:
    """A mixed load on one pool, and what it knows of the blocks in it."""

    chance: random.Random
    drivers: list[CrashingDriver]
    is_sealed: bool = False
    blocks: dict[str, Told] = field(default_factory=dict)
    durable: set[str] = field(default_factory=set)  # Their entries and bytes were synced since.
    ended: set[str] = field(default_factory=set)  # Gone, and the sync came after.
    going: set[str] = field(default_factory=set)  # Gone, and not synced.
    lives: dict[str, int] = field(default_factory=dict)  # Of the segment it was written into.
    number: int = 0
    wrong: list[str] = field(default_factory=list)
    back_count: int = 0
    durable_count: int = 0
    reuse_count: int = 0
    corrupt_count: int = 0

    def open(self, drivers: list[CrashingDriver]) -> BookedPool:
        return BookedPool(drivers, make_sealer=partial(Sealer, KEYS) if self.is_sealed else None)

    def run_life(self) -> None:
        """Open, recover and check, work, and lose power."""
        pool = self.open([CrashingDriver(one.file, one.name) for one in self.drivers])
        self.check(pool)
        for _ in range(STEPS):
            self.step(pool)
        assert pool.book.check_invariants() == []
        for driver in self.drivers:
            driver.file.crash(self.chance)

    def step(self, pool: BookedPool) -> None:
        action = self.chance.randrange(10)
        if action < 5:
            self.demote(pool)
        elif action < 6 and self.blocks:
            names = self.chance.sample(sorted(self.blocks), min(3, len(self.blocks)))
            pool.void(np.array([self.blocks[name].slot for name in names], np.uint32))
            for name in names:
                self.forget(name)
        elif action < 9:
            pool.write_table()
        else:  # The disk happens to write its volatile cache out.
            while pool.write_table() is not None:
                pass
            for driver in self.drivers:
                driver.file.sync()
            self.durable = set(self.blocks)
            self.ended |= self.going
            self.going.clear()

    def demote(self, pool: BookedPool) -> None:
        namespace = self.chance.choice(sorted(LAYOUTS))
        names = [f"{self.number + i}" for i in range(self.chance.randrange(1, 12))]
        self.number += len(names)
        slots, evicted = demote(pool, names, namespace=namespace, layout=LAYOUTS[namespace])
        self.reuse_count += len(evicted) > 0
        gone = set(evicted.tolist())
        for name in [name for name, told in self.blocks.items() if told.slot in gone]:
            self.forget(name)
        for name, slot in zip(names, slots.tolist(), strict=False):
            self.blocks[name] = Told(namespace, slot)
            self.lives[name] = pool.header_of(slot).sequence

    def forget(self, name: str) -> None:
        del self.blocks[name]
        self.durable.discard(name)
        self.going.add(name)

    def check(self, pool: BookedPool) -> None:
        """Read every block that recovery gives; then know no more than that."""
        found = pool.recover(EPOCHS)
        assert pool.book.check_invariants() == []
        by_hash = {
            bytes(block): slot
            for block, slot in zip(found.hashes, found.slots.tolist(), strict=True)
        }
        assert len(by_hash) == len(found.slots), "a block came back twice"
        right: dict[str, Told] = {}
        for number in range(self.number):
            slot = by_hash.pop(hash_of(str(number)), None)
            if slot is not None and (told := self.read(pool, str(number), slot)):
                right[str(number)] = told
        assert not by_hash, "a block came back that was never demoted"
        self.back_count += len(self.durable & set(right))
        self.durable_count += len(self.durable)
        returned = self.ended & set(right)
        if returned:
            self.wrong.append(f"gone blocks came back: {sorted(returned)}")
        self.blocks, self.durable, self.going = right, set(), set()

    def read(self, pool: BookedPool, name: str, slot: int) -> Told | None:
        header = pool.header_of(slot)
        namespace = next(one for one in LAYOUTS if fingerprint_of(one) == header.fingerprint)
        # An older header may stand: the new one was lost, and the namespace was the same.
        if header.sequence > self.lives[name]:
            self.wrong.append(f"block {name} came back in a later life of its segment")
        layout = LAYOUTS[namespace]
        slots = np.array([slot], np.uint32)
        [outcome], [views] = promote(pool, slots, layout)
        if outcome is Outcome.CORRUPT:
            self.corrupt_count += 1
            pool.void(slots)
            return None
        assert outcome is Outcome.DONE
        if not is_right(views, hash_of(name), layout):
            self.wrong.append(f"block {name} came back with wrong bytes")
        return Told(namespace, slot)


def run_load(seed: int) -> Load:
    chance = random.Random(seed)
    load = Load(chance, make_drivers(chance.choice((1, 2)), LENGTH_BYTES), is_sealed=seed % 3 == 0)
    for _ in range(LIVES):
        load.run_life()
    load.check(load.open(load.drivers))
    return load


@pytest.mark.full_form
def test_after_a_power_cut_each_block_is_right_or_a_miss() -> None:
    loads = {seed: run_load(seed) for seed in range(rounds(short=40, full=600))}
    wrong = [f"seed {seed}: {one}" for seed, load in loads.items() for one in load.wrong]
    assert not wrong, "\n".join(wrong)
    back = sum(load.back_count for load in loads.values())
    durable = sum(load.durable_count for load in loads.values())
    corrupt = sum(load.corrupt_count for load in loads.values())
    reused = sum(load.reuse_count for load in loads.values())
    lost = sum(driver.file.lost_count for load in loads.values() for driver in load.drivers)
    kept = sum(driver.file.kept_count for load in loads.values() for driver in load.drivers)
    state_finding(
        f"{len(loads)} seeds: {kept} unsynced sectors kept, {lost} lost; {corrupt} torn blocks "
        f"were misses; segments reused {reused} times; {back} of {durable} untouched came back"
    )
    assert min(lost, kept, corrupt, reused, durable) > 0, "the load tests nothing"
    assert back >= 0.95 * durable, f"only {back} of {durable} untouched blocks came back"


CHILD = """
import sys
from pathlib import Path
from tests.crash.test_nvme_crash import demote_for_ever
demote_for_ever([Path(word) for word in sys.argv[2:]], int(sys.argv[1]))
"""
FILE_BYTES = 4 << 20
KEPT_COUNT = 12
LINE_BLOCKS = 8


def demote_for_ever(paths: list[Path], first: int) -> None:
    """In the child: blocks that stay in a pinned segment, then others round and round."""
    pool = BookedPool(open_paths(paths))
    pool.recover(EPOCHS)
    kept, _ = demote(pool, [f"kept{i}" for i in range(KEPT_COUNT)], namespace="small")
    pool.book.pin(kept)
    if (batch := pool.write_table()) is not None:
        assert batch.wait_returned(20)
    while True:
        demote(pool, [f"{first + i}" for i in range(LINE_BLOCKS)], namespace="large", layout=LARGE)
        first += LINE_BLOCKS
        pool.write_table()
        sys.stdout.write(f"{first}\n")
        sys.stdout.flush()


@pytest.mark.full_form
def test_a_killed_writer_leaves_right_blocks_in_a_real_file(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    format_paths(
        paths,
        FILE_BYTES,
        pool_id=POOL_ID,
        generation=GENERATION,
        segment_bytes=SEGMENT_BYTES,
        row_count_max=ROW_COUNT_MAX,
    )
    first = 0
    for number in range(rounds(short=3, full=40)):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(first), *map(str, paths)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        try:
            assert child.stdout.readline(), "the child never wrote"
            time.sleep(0.05 + 0.0137 * (number % 7))
        finally:
            child.send_signal(signal.SIGKILL)
            lines = child.stdout.read().split()
            child.stdout.close()
            child.wait()
        first = int(lines[-1]) + 2 * LINE_BLOCKS if lines else first + 2 * LINE_BLOCKS
        assert_all_right(paths, first)


def assert_all_right(paths: list[Path], end: int) -> None:
    pool = BookedPool(open_paths(paths), writable=False)
    found = pool.recover(EPOCHS)
    names = [f"kept{i}" for i in range(KEPT_COUNT)] + [str(number) for number in range(end)]
    by_hash = {bytes(hash_of(name)): name for name in names}
    kept_count = 0
    for block, slot in zip(found.hashes, found.slots.tolist(), strict=True):
        name = by_hash[bytes(block)]
        layout: SlotLayout = pool.header_of(slot).layout
        [outcome], [views] = promote(pool, np.array([slot], np.uint32), layout)
        if outcome is Outcome.DONE:
            assert is_right(views, hash_of(name), layout), f"wrong bytes of {name}"
            kept_count += name.startswith("kept")
    assert pool.close(clean=False)
    assert kept_count == KEPT_COUNT, "blocks that nothing touched are lost"
