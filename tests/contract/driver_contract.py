"""What every driver promises, whatever it moves bytes to."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.io.driver import Access, Batch, Driver, Outcome
from kvtier.memory import Bytes

UNIT = 4096  # A multiple of every alignment.
LENGTH_BYTES = 256 * UNIT
SECONDS_MAX = 20.0


def views_of(count: int, *, fill: int = 0) -> list[Bytes]:
    """Page-aligned views of one unit each; view i is filled with `fill` + i."""
    array = np.frombuffer(mmap.mmap(-1, count * UNIT), np.uint8).reshape(count, UNIT)
    array[:] = np.arange(fill, fill + count, dtype=np.uint8)[:, None]
    return list(array)


def accesses_of(offsets: list[int], views: list[Bytes]) -> list[Access]:
    return [Access(i, offsets[i] * UNIT, (views[i],)) for i in range(len(offsets))]


def write(driver: Driver, offsets: list[int], views: list[Bytes]) -> list[Outcome]:
    batch = Batch(len(offsets))
    driver.write(accesses_of(offsets, views), batch)
    return batch.wait(SECONDS_MAX)


def read(driver: Driver, offsets: list[int]) -> tuple[list[Outcome], list[Bytes]]:
    views = views_of(len(offsets))
    batch = Batch(len(offsets))
    driver.read(accesses_of(offsets, views), batch)
    return batch.wait(SECONDS_MAX), views


class DriverContract(ABC):
    @abstractmethod
    def make_driver(self, folder: Path) -> Driver:
        """A driver of LENGTH_BYTES, all of them zero."""

    @pytest.fixture
    def driver(self, tmp_path: Path) -> Iterator[Driver]:
        driver = self.make_driver(tmp_path)
        yield driver
        assert driver.close()

    def test_what_was_written_is_read_wherever_it_lies(self, driver: Driver) -> None:
        offsets = [7, 3, 4, 5, 255, 0]
        views = views_of(6, fill=10)
        assert write(driver, offsets, views) == [Outcome.DONE] * 6
        outcomes, found = read(driver, [0, 3, 4, 5, 6, 7, 255])
        assert outcomes == [Outcome.DONE] * 7
        assert [int(view[0]) for view in found] == [15, 11, 12, 13, 0, 10, 14]
        assert all((view == view[0]).all() for view in found)

    def test_the_views_of_one_access_lie_one_after_the_other(self, driver: Driver) -> None:
        views = views_of(3, fill=20)
        batch = Batch(1)
        driver.write([Access(0, 9 * UNIT, tuple(views))], batch)
        assert batch.wait(SECONDS_MAX) == [Outcome.DONE]
        assert [int(view[-1]) for view in read(driver, [9, 10, 11])[1]] == [20, 21, 22]

    def test_a_batch_ends_once_and_returns_once(self, driver: Driver) -> None:
        told: list[str] = []
        batch = Batch(
            40,
            on_ended=lambda _: told.append("ended"),
            on_returned=lambda _: told.append("returned"),
        )
        driver.write(accesses_of(list(range(40)), views_of(40)), batch)
        assert batch.wait(SECONDS_MAX) == [Outcome.DONE] * 40
        assert batch.wait_returned(SECONDS_MAX)
        batch.give_up()
        driver.close()
        assert told == ["ended", "returned"]

    def test_a_check_refuses_a_write_before_and_a_read_after(self, driver: Driver) -> None:
        views = views_of(3, fill=1)
        batch = Batch(3, check=lambda member: member != 1)
        driver.write(accesses_of([0, 1, 2], views), batch)
        assert batch.wait(SECONDS_MAX) == [Outcome.DONE, Outcome.CORRUPT, Outcome.DONE]
        assert [int(view[0]) for view in read(driver, [0, 1, 2])[1]] == [1, 0, 3]
        into = views_of(3)
        batch = Batch(3, check=lambda member: bool(into[member][0]))
        driver.read(accesses_of([0, 1, 2], into), batch)
        assert batch.wait(SECONDS_MAX) == [Outcome.DONE, Outcome.CORRUPT, Outcome.DONE]

    def test_two_drivers_may_share_a_batch(self, driver: Driver, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        other = self.make_driver(tmp_path / "other")
        views = views_of(2, fill=5)
        batch = Batch(2)
        driver.write([Access(0, 0, (views[0],))], batch)
        other.write([Access(1, 0, (views[1],))], batch)
        assert batch.wait(SECONDS_MAX) == [Outcome.DONE] * 2
        assert int(read(driver, [0])[1][0][0]) == 5
        assert int(read(other, [0])[1][0][0]) == 6
        assert other.close()

    def test_nothing_is_begun_after_close(self, driver: Driver) -> None:
        write(driver, [0], views_of(1, fill=1))
        assert driver.close()
        assert write(driver, [0], views_of(1, fill=2)) == [Outcome.REFUSED]
        assert read(driver, [0])[0] == [Outcome.REFUSED]

    def test_an_access_beyond_the_capacity_is_our_own_mistake(self, driver: Driver) -> None:
        with pytest.raises(AssertionError):
            driver.write([Access(0, LENGTH_BYTES, (views_of(1)[0],))], Batch(1))

    def test_sync_says_that_it_is_done(self, driver: Driver) -> None:
        write(driver, [1], views_of(1))
        assert driver.sync() is Outcome.DONE
