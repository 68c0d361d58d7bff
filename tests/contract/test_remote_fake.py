"""The fake remote engine keeps the contract: it is the measure for the others."""

from __future__ import annotations

import pytest

from kvtier.pools.remote.engine import RemoteEngine
from tests.contract.remote_contract import RemoteEngineContract
from tests.support.fake_remote import FakeRemote, Shelf


class TestFakeRemote(RemoteEngineContract):
    @pytest.fixture(autouse=True)
    def _empty(self) -> None:
        self.shelf = Shelf()

    async def make_engine(self) -> RemoteEngine:
        return FakeRemote(self.shelf)
