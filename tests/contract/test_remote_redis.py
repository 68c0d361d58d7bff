"""Redis (or Valkey) keeps the contract of remote engines: a server, and a cluster of three."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.pools.remote.engine import RemoteEngine
from kvtier.pools.remote.redis import RedisEngine, RedisSettings
from tests.contract.remote_contract import RemoteEngineContract
from tests.support.redis_server import RedisServer, needs_redis, redis_cluster, redis_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@needs_redis
class TestRedisEngine(RemoteEngineContract):
    @pytest.fixture(autouse=True)
    def _empty(self, server: RedisServer) -> None:
        server.ask("flushall")
        self.settings = RedisSettings((("127.0.0.1", server.port),))

    async def make_engine(self) -> RemoteEngine:
        return RedisEngine(self.settings)


@needs_redis
class TestRedisCluster(RemoteEngineContract):
    @pytest.fixture(autouse=True)
    def _empty(self, cluster: list[RedisServer]) -> None:
        for server in cluster:
            server.ask("flushall")
        addresses = tuple(("127.0.0.1", server.port) for server in cluster)
        self.settings = RedisSettings(addresses, is_cluster=True)

    async def make_engine(self) -> RemoteEngine:
        return RedisEngine(self.settings)
