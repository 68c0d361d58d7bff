"""Drivers keep their contract: over a real file, direct and buffered, and over memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.io import file as file_module
from kvtier.io.driver import Access, Batch, Driver, Outcome
from kvtier.io.file import QUEUE_ACCESSES_MAX, FileDriver
from tests.contract.driver_contract import (
    LENGTH_BYTES,
    SECONDS_MAX,
    UNIT,
    DriverContract,
    accesses_of,
    read,
    views_of,
    write,
)
from tests.support.crashing_file import CrashingDriver, CrashingFile, Fault, FaultyDriver


def make_file(folder: Path) -> Path:
    path = folder / "file"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, LENGTH_BYTES)
    return path


class TestFileDriver(DriverContract):
    def make_driver(self, folder: Path) -> Driver:
        return FileDriver(make_file(folder))


class TestBufferedFileDriver(DriverContract):
    @pytest.fixture(autouse=True)
    def _no_direct_io(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvtier.io.alignment.told_alignment", lambda _fd: 0)

    def make_driver(self, folder: Path) -> Driver:
        driver = FileDriver(make_file(folder))
        assert not driver.is_direct
        assert driver.alignment == 1
        assert "no direct I/O" in driver.buffered_reason
        return driver


class TestCrashingDriver(DriverContract):
    def make_driver(self, folder: Path) -> Driver:
        return CrashingDriver(CrashingFile(LENGTH_BYTES))


class TestFaultyDriver(DriverContract):
    def make_driver(self, folder: Path) -> Driver:
        return FaultyDriver(CrashingDriver(CrashingFile(LENGTH_BYTES)), {})


class Calls:
    """Stands in front of os.preadv and os.pwritev and tells of every call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int, int]] = []  # (which, offset in units, views)
        self.hold = threading.Event()
        self.hold.set()
        self.short_once = False
        self.short_always = False
        self.error_offset: int | None = None
        for which in ("preadv", "pwritev"):
            monkeypatch.setattr(file_module.os, which, self._stand_in(which, getattr(os, which)))

    def _stand_in(self, which, real):  # type: ignore[no-untyped-def]
        def call(fd: int, views: list, offset: int) -> int:  # type: ignore[type-arg]
            self.seen.append((which, offset // UNIT, len(views)))
            assert self.hold.wait(SECONDS_MAX)
            end = offset + sum(view.nbytes for view in views)
            if self.error_offset is not None and offset <= self.error_offset * UNIT < end:
                raise OSError(5, "planted")
            if self.short_once or self.short_always:
                self.short_once = False
                views = [views[0], *(view[:0] for view in views[1:])]
                views[0] = views[0][: max(UNIT // 2, views[0].nbytes // 2)]
            return int(real(fd, views, offset))

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def opened(folder: Path, calls: Calls, *, depth: int) -> FileDriver:
    driver = FileDriver(make_file(folder), depth=depth)
    calls.seen.clear()  # Those that tried the alignment.
    return driver


def test_accesses_side_by_side_go_in_one_call(tmp_path: Path, calls: Calls) -> None:
    driver = opened(tmp_path, calls, depth=1)
    write(driver, [12, 3, 10, 11, 5], views_of(5))
    assert sorted(calls.seen) == [("pwritev", 3, 1), ("pwritev", 5, 1), ("pwritev", 10, 3)]
    driver.close()


def test_waiting_reads_go_before_waiting_writes(tmp_path: Path, calls: Calls) -> None:
    driver = opened(tmp_path, calls, depth=1)
    calls.hold.clear()
    views = views_of(6)
    batch = Batch(6)
    for member, offset in enumerate([0, 20, 40]):
        driver.write([Access(member, offset * UNIT, (views[member],))], batch)
    for member, offset in enumerate([60, 80, 100], start=3):
        driver.read([Access(member, offset * UNIT, (views[member],))], batch)
    calls.hold.set()
    assert batch.wait(SECONDS_MAX) == [Outcome.DONE] * 6
    kinds = [which for which, _, _ in calls.seen]
    # The one thread may have begun the first write before the first read came.
    assert "".join(kind[1] for kind in kinds) in {"rrrwww", "wrrrww"}
    driver.close()


def test_no_more_calls_are_under_way_than_the_depth(tmp_path: Path, calls: Calls) -> None:
    driver = opened(tmp_path, calls, depth=2)
    calls.hold.clear()
    batch = Batch(10)
    driver.write(accesses_of(list(range(0, 100, 10)), views_of(10)), batch)
    assert not batch.wait_returned(0.05)
    assert len(calls.seen) == 2
    calls.hold.set()
    assert batch.wait(SECONDS_MAX) == [Outcome.DONE] * 10
    driver.close()


def test_a_deadline_ends_the_wait_and_the_buffer_stays_taken(tmp_path: Path, calls: Calls) -> None:
    driver = opened(tmp_path, calls, depth=1)
    write(driver, [0, 8], views_of(2, fill=1))
    calls.hold.clear()
    returned = threading.Event()
    into = views_of(2)
    batch = Batch(2, on_returned=lambda _: returned.set())
    driver.read(accesses_of([0, 8], into), batch)
    assert batch.wait(0.05) == [Outcome.TIMED_OUT] * 2
    assert not batch.is_returned
    assert not returned.is_set()
    calls.hold.set()
    assert returned.wait(SECONDS_MAX)
    assert int(into[0][0]) == 1, "the late bytes land where they were sent to"
    assert batch.outcomes == [Outcome.TIMED_OUT] * 2, "a late answer changes nothing"
    assert int(into[1][0]) == 1, "what had not begun when the wait ended is not begun"
    driver.close()


def test_a_short_call_is_tried_once_more(tmp_path: Path, calls: Calls) -> None:
    driver = opened(tmp_path, calls, depth=1)
    calls.short_once = True
    assert write(driver, [0, 1, 2], views_of(3, fill=7)) == [Outcome.DONE] * 3
    calls.short_once = True
    outcomes, found = read(driver, [0, 1, 2])
    assert outcomes == [Outcome.DONE] * 3
    assert [int(view[-1]) for view in found] == [7, 8, 9]
    driver.close()


def test_a_call_that_is_short_twice_is_reported(tmp_path: Path, calls: Calls) -> None:
    driver = opened(tmp_path, calls, depth=1)
    calls.short_always = True
    assert write(driver, [0, 1], views_of(2)) == [Outcome.SHORT] * 2
    assert write(driver, [5], views_of(1)) == [Outcome.SHORT]
    driver.close()


def test_a_bad_place_costs_only_its_own_access(tmp_path: Path, calls: Calls) -> None:
    driver = opened(tmp_path, calls, depth=1)
    calls.error_offset = 1
    assert write(driver, [0, 1, 2], views_of(3)) == [Outcome.DONE, Outcome.EIO, Outcome.DONE]
    driver.close()


def test_a_full_queue_refuses_a_batch_and_begins_nothing_of_it(
    tmp_path: Path, calls: Calls
) -> None:
    driver = opened(tmp_path, calls, depth=1)
    calls.hold.clear()
    [view] = views_of(1)
    members = [Access(member, 0, (view,)) for member in range(QUEUE_ACCESSES_MAX + 1)]
    assert driver.queued_count == 0
    refused = Batch(len(members))
    driver.write(members, refused)
    assert refused.wait(SECONDS_MAX) == [Outcome.REFUSED] * len(members)
    assert not calls.seen
    calls.hold.set()
    driver.close()


def test_close_refuses_what_waits_and_tells_of_a_call_that_hangs(
    tmp_path: Path, calls: Calls
) -> None:
    driver = opened(tmp_path, calls, depth=1)
    calls.hold.clear()
    batch = Batch(3)
    driver.write(accesses_of([0, 10, 20], views_of(3)), batch)
    while not calls.seen:
        assert not batch.wait_returned(0.001)
    assert not driver.close(timeout_seconds=0.05)
    calls.hold.set()
    assert driver.close()
    assert batch.wait(SECONDS_MAX) == [Outcome.DONE, Outcome.REFUSED, Outcome.REFUSED]


def test_a_file_has_one_driver(tmp_path: Path) -> None:
    driver = FileDriver(make_file(tmp_path))
    with pytest.raises(ConfigError, match="in use by another process"):
        FileDriver(tmp_path / "file")
    driver.close()
    FileDriver(tmp_path / "file").close()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none: No such file"):
        FileDriver(tmp_path / "none")


def test_a_stalled_access_is_taken_until_it_is_released() -> None:
    driver = FaultyDriver(CrashingDriver(CrashingFile(LENGTH_BYTES)), {1: Fault.STALL})
    batch = Batch(2)
    driver.write(accesses_of([0, 1], views_of(2, fill=1)), batch)
    batch.give_up()
    assert batch.outcomes == [Outcome.DONE, Outcome.TIMED_OUT]
    assert not batch.is_returned
    driver.release()
    assert batch.is_returned
    assert int(read(driver, [1])[1][0][0]) == 2
