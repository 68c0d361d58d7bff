"""NVMe in the daemon: blocks outlive it, come up when asked for, and a disk ends nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.client import Client, Namespace
from tests.e2e.client.conftest import eventually
from tests.support.daemon import RunningDaemon
from tests.support.known_blocks import chain_hashes, spec_of
from tests.support.nvme_daemon import (
    got_count,
    make_pool,
    put_all,
    running_nvme_daemon,
    wait_below,
    wait_state,
)

COUNT = 20
HIT = 'kvtier_hit_blocks_total{{call="{}",tier="nvme"}}'

pytestmark = pytest.mark.slow


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    make_pool(path)
    return path


def opened(client: Client, salt: str = "") -> Namespace:
    namespace = client.open_namespace(spec_of(salt))
    assert client.wait_namespace(namespace, 10)
    return namespace


def mapped(client: Client, salt: str = "") -> Namespace:
    namespace = opened(client, salt)
    eventually(lambda: client.arena(namespace).mapped_slot_count > 0)
    return namespace


def end_in_order(daemon: RunningDaemon) -> None:
    assert daemon.terminate() == 0


def end_at_once(daemon: RunningDaemon) -> None:
    daemon.kill()


@pytest.mark.parametrize("end", [end_in_order, end_at_once])
def test_blocks_outlive_the_daemon(pool: Path, end: Callable[[RunningDaemon], None]) -> None:
    hashes = chain_hashes("kept", COUNT)
    with running_nvme_daemon(pool) as daemon:
        with Client(daemon.socket) as client:
            put_all(client, opened(client), hashes)
            wait_below(daemon, COUNT)
        end(daemon)
        daemon.start()
        wait_state(daemon, "on")
        assert daemon.metrics()["kvtier_nvme_recovered_blocks"] == COUNT
        with Client(daemon.socket) as client:
            namespace = opened(client)
            found = client.match(namespace, hashes)
            assert (found.matched_count, found.memory_count) == (COUNT, 0)
            assert got_count(client, namespace, hashes) == COUNT
            metrics = daemon.metrics()
            assert metrics[HIT.format("get")] == COUNT
            assert client.match(namespace, hashes).memory_count == COUNT
            assert not client.check().violations
            [_, nvme] = client.stats().tiers
            assert (nvme.tier, nvme.ready_count) == ("nvme", COUNT)
