"""The two places for parked descriptors keep the contract: a real holder, a fake FD store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.server.parking import HolderParking, Parking, SystemdParking
from tests.contract.parking_contract import ParkingContract
from tests.support.parking_places import FakeFdStore, HolderProcess


class TestHolder(ParkingContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[HolderProcess]:
        holder = HolderProcess(tmp_path / "hold.sock")
        yield holder
        assert holder.end() == 0

    def new_life(self, place: object) -> Parking:
        assert isinstance(place, HolderProcess)
        return HolderParking(place.path)


class TestSystemd(ParkingContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[FakeFdStore]:
        store = FakeFdStore(tmp_path / "notify.sock")
        yield store
        store.close()

    def new_life(self, place: object) -> Parking:
        assert isinstance(place, FakeFdStore)
        return SystemdParking(str(place.path), place.hand_over())

    def settle(self, place: object) -> None:
        assert isinstance(place, FakeFdStore)
        place.read()

    def test_a_pidfd_is_kept_when_its_process_dies(self, place: FakeFdStore) -> None:
        life = self.new_life(place)
        with open("/dev/null", "rb") as file:
            life.park("session-1", file.fileno())
        place.read()
        assert place.unpolled == {"session-1"}
