"""The shared file system keeps the contract of remote engines, on a real one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvtier.pools.remote.engine import RemoteEngine
from kvtier.pools.remote.files import FilesEngine, FilesSettings, prepare_root
from tests.contract.remote_contract import RemoteEngineContract


class TestFilesEngine(RemoteEngineContract):
    @pytest.fixture(autouse=True)
    def _share(self, tmp_path: Path) -> None:
        self.root = tmp_path / "share"
        self.names = itertools.count()
        prepare_root(self.root)

    async def make_engine(self) -> RemoteEngine:
        settings = FilesSettings(self.root, capacity_bytes=1 << 30)
        return FilesEngine(settings, unique=f"client{next(self.names)}")
