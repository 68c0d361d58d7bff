"""Mooncake Store keeps the contract of remote engines: a real master and clients, over TCP."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.pools.remote.engine import RemoteEngine
from kvtier.pools.remote.mooncake import MooncakeEngine, MooncakeSettings
from tests.contract.remote_contract import RemoteEngineContract
from tests.support.mooncake_master import MooncakeMaster, mooncake_master, needs_mooncake


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    with mooncake_master(tmp_path_factory.mktemp("mooncake")) as master:
        yield master


@pytest.fixture(scope="module")
def stores(master: MooncakeMaster) -> Iterator[list[Any]]:
    """Two clients for all tests: one takes a second to close."""
    from mooncake.store import MooncakeDistributedStore

    stores = [MooncakeDistributedStore() for _ in range(2)]
    for store in stores:
        address = master.address
        code = store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", address)
        assert code == 0
    yield stores
    for store in stores:
        store.close()


@needs_mooncake
class TestMooncakeEngine(RemoteEngineContract):
    @pytest.fixture(autouse=True)
    def _clients(self, master: MooncakeMaster, stores: list[Any]) -> None:
        self.settings = MooncakeSettings(master.address, "127.0.0.1")
        self.stores = itertools.cycle(stores)
        stores[0].remove_all(True)

    async def make_engine(self) -> RemoteEngine:
        return MooncakeEngine(self.settings, store=next(self.stores))
