"""Files that lose power, and drivers that fail when told to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from kvtier.io.driver import Access, Batch, Driver, Outcome
from kvtier.memory import Bytes

SECTOR_BYTES = 512


class CrashingFile:
    """Bytes of which only those before the last `sync` are sure to survive `crash`."""

    def __init__(self, length_bytes: int) -> None:
        assert length_bytes % SECTOR_BYTES == 0
        self._durable = np.zeros(length_bytes, np.uint8)
        self._seen = self._durable.copy()  # What a read gives: every write so far.
        self._pending: list[tuple[int, Bytes]] = []
        self.kept_count = self.lost_count = 0  # Sectors, over all crashes.

    @property
    def length_bytes(self) -> int:
        return len(self._durable)

    def read(self, offset: int, view: Bytes) -> None:
        np.copyto(view, self._seen[offset : offset + len(view)])

    def write(self, offset: int, view: Bytes) -> None:
        assert offset + len(view) <= self.length_bytes, "a write beyond the end"
        np.copyto(self._seen[offset : offset + len(view)], view)
        self._pending.append((offset, view.copy()))

    def sync(self) -> None:
        np.copyto(self._durable, self._seen)
        self._pending.clear()

    def crash(self, chance: random.Random) -> None:
        """The power goes. Each unsynced write is kept, lost, or torn by sector, in any order.

        Writes of the same sector may land in the wrong order: a disk with a volatile cache
        promises none.
        """
        chance.shuffle(self._pending)
        for offset, data in self._pending:
            kept_share = chance.choice((0.0, 0.5, 0.9, 1.0))
            for first in range(0, len(data), SECTOR_BYTES):
                if chance.random() < kept_share:
                    sector = data[first : first + SECTOR_BYTES]
                    self._durable[offset + first : offset + first + len(sector)] = sector
                    self.kept_count += 1
                else:
                    self.lost_count += 1
        self._pending.clear()
        np.copyto(self._seen, self._durable)


class CrashingDriver:
    """Implements kvtier.io.driver.Driver over a CrashingFile; every call is over at once."""

    def __init__(self, file: CrashingFile, name: str = "memory", alignment: int = 512) -> None:
        self.file = file
        self.name = name
        self.alignment = alignment
        self.is_closed = False

    @property
    def length_bytes(self) -> int:
        return self.file.length_bytes

    def read(self, accesses: Sequence[Access], batch: Batch) -> None:
        for access in accesses:
            if self.is_closed:
                batch.finish(access.member, Outcome.REFUSED)
                continue
            self._assert_fits(access)
            offset = access.offset
            for view in batch.to_read([access])[0].views:
                self.file.read(offset, view)
                offset += len(view)
            sound = batch.is_sound(access.member)
            batch.finish(access.member, Outcome.DONE if sound else Outcome.CORRUPT)

    def write(self, accesses: Sequence[Access], batch: Batch) -> None:
        for access in accesses:
            if self.is_closed:
                batch.finish(access.member, Outcome.REFUSED)
                continue
            self._assert_fits(access)
            if not batch.is_sound(access.member):
                batch.finish(access.member, Outcome.CORRUPT)
                continue
            offset = access.offset
            for view in batch.to_write([access])[0].views:
                self.file.write(offset, view)
                offset += len(view)
            batch.finish(access.member, Outcome.DONE)

    def sync(self) -> Outcome:
        self.file.sync()
        return Outcome.DONE

    def punch(self, first: int, length_bytes: int) -> bool:
        return False

    def close(self, timeout_seconds: float = 5.0) -> bool:
        self.is_closed = True
        return True

    def _assert_fits(self, access: Access) -> None:
        assert 0 <= access.offset < access.offset + access.length_bytes <= self.length_bytes
        assert access.offset % self.alignment == 0
        assert all(len(view) % self.alignment == 0 for view in access.views)


class Fault(StrEnum):
    """What a call may suffer."""

    EIO = "eio"
    SHORT = "short"
    NO_SPACE = "no_space"
    GONE = "gone"
    BIT_FLIP = "bit_flip"  # Silent: of what is read, or of what is written.
    STALL = "stall"  # Under way until `release`.


_OUTCOMES = {
    Fault.EIO: Outcome.EIO,
    Fault.SHORT: Outcome.SHORT,
    Fault.NO_SPACE: Outcome.NO_SPACE,
    Fault.GONE: Outcome.GONE,
}


class FaultyDriver:
    """A driver whose access number n (reads and writes together, from 0) suffers `faults[n]`."""

    def __init__(self, driver: CrashingDriver, faults: dict[int, Fault]) -> None:
        self._driver = driver
        self._faults = faults
        self._stalled: list[tuple[bool, Access, Batch]] = []
        self.access_count = 0

    @property
    def name(self) -> str:
        return self._driver.name

    @property
    def alignment(self) -> int:
        return self._driver.alignment

    @property
    def length_bytes(self) -> int:
        return self._driver.length_bytes

    def read(self, accesses: Sequence[Access], batch: Batch) -> None:
        for access in accesses:
            self._one(access, batch, is_read=True)

    def write(self, accesses: Sequence[Access], batch: Batch) -> None:
        for access in accesses:
            self._one(access, batch, is_read=False)

    def sync(self) -> Outcome:
        return self._driver.sync()

    def punch(self, first: int, length_bytes: int) -> bool:
        return self._driver.punch(first, length_bytes)

    def close(self, timeout_seconds: float = 5.0) -> bool:
        return self._driver.close(timeout_seconds) and not self._stalled

    def reopen(self) -> None:
        """Another process opens the file."""
        self._driver.is_closed = False

    def release(self) -> None:
        """Calls that stalled go on now: late bytes land where they were sent to."""
        stalled, self._stalled = self._stalled, []
        for is_read, access, batch in stalled:
            (self._driver.read if is_read else self._driver.write)([access], batch)

    def _one(self, access: Access, batch: Batch, *, is_read: bool) -> None:
        fault = self._faults.get(self.access_count)
        self.access_count += 1
        function = self._driver.read if is_read else self._driver.write
        if fault is None:
            function([access], batch)
        elif fault is Fault.STALL:
            self._stalled.append((is_read, access, batch))
        elif fault is Fault.BIT_FLIP:
            file, at = self._driver.file, access.offset + access.length_bytes // 3
            if is_read:
                _flip(file, at)
            function([access], batch)
            if not is_read:
                _flip(file, at)
        else:
            batch.finish(access.member, _OUTCOMES[fault])


def _flip(file: CrashingFile, offset: int) -> None:
    byte = np.zeros(1, np.uint8)
    file.read(offset, byte)
    byte ^= 0x10
    file.write(offset, byte)


def is_driver(driver: Driver) -> Driver:
    """For the type checker: what stands here implements the protocol."""
    return driver
