"""What every place for parked file descriptors promises."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.io.memory import create_memfd
from kvtier.server.holder import close_all
from kvtier.server.parking import Parking, is_same_file


class ParkingContract(ABC):
    """`new_life` is what a daemon does that was started after the one before died."""

    @abstractmethod
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[object]: ...

    @abstractmethod
    def new_life(self, place: object) -> Parking: ...

    def test_what_is_parked_outlives_the_one_who_parked_it(self, place: object) -> None:
        first = self.new_life(place)
        fd = create_memfd("kvtier-slab-1", 4096)
        os.pwrite(fd, b"bytes", 0)
        first.park("slab-1", fd)
        os.close(fd)
        first.close()
        taken = self.new_life(place).take_all()
        assert os.pread(taken["slab-1"], 5, 0) == b"bytes"
        close_all(list(taken.values()))

    def test_what_was_taken_stays_parked(self, place: object) -> None:
        first = self.new_life(place)
        with open("/dev/null", "rb") as file:
            first.park("table", file.fileno())
        first.close()
        for _ in range(2):
            life = self.new_life(place)
            taken = life.take_all()
            assert list(taken) == ["table"]
            close_all(list(taken.values()))
            life.close()

    def test_what_was_unparked_is_let_go_of(self, place: object) -> None:
        first = self.new_life(place)
        reader, writer = os.pipe()
        first.park("session-1", writer)
        os.close(writer)
        first.unpark("session-1")
        first.unpark("unknown")
        first.close()
        assert self.new_life(place).take_all() == {}
        assert os.read(reader, 1) == b"", "somebody holds the other end still"
        os.close(reader)

    def test_a_name_is_of_the_file_parked_last(self, place: object) -> None:
        first = self.new_life(place)
        fds = [create_memfd(f"kvtier-{number}", 4096) for number in range(2)]
        for fd in fds:
            first.park("manifest", fd)
        first.close()
        taken = self.new_life(place).take_all()
        assert list(taken) == ["manifest"]
        assert is_same_file(taken["manifest"], fds[1])
        close_all([*taken.values(), *fds])

    def test_many_come_back_each_under_its_name(self, place: object) -> None:
        first = self.new_life(place)
        fds = {f"slab-{number}": create_memfd(f"kvtier-{number}", 4096) for number in range(205)}
        for name, fd in fds.items():
            first.park(name, fd)
            self.settle(place)
        first.close()
        taken = self.new_life(place).take_all()
        assert set(taken) == set(fds)
        assert all(is_same_file(taken[name], fd) for name, fd in fds.items())
        close_all([*taken.values(), *fds.values()])

    def settle(self, place: object) -> None:
        """Give the place a turn, where it needs one."""
        del place
