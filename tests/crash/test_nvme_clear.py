"""Clear of a namespace on NVMe, then a power cut that takes the last writes of the slot table."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvtier.client import Client, Namespace
from tests.support.daemon import RunningDaemon
from tests.support.known_blocks import chain_hashes, onboard, spec_of
from tests.support.nvme_daemon import (
    client_of,
    got_count,
    make_pool,
    put_all,
    running_nvme_daemon,
    wait_below,
    wait_state,
)
from tests.support.power_cut import TableCopy
from tests.support.processes import eventually

COUNT = 20
RECOVERED = "kvtier_nvme_recovered_blocks"

pytestmark = pytest.mark.slow


def opened(client: Client, salt: str) -> Namespace:
    namespace = client.open_namespace(spec_of(salt))
    assert client.wait_namespace(namespace, 10)
    return namespace


def mapped(client: Client, salt: str) -> Namespace:
    namespace = opened(client, salt)
    arena = client.arena(namespace)
    eventually(lambda: arena.mapped_slot_count > 0, "slots are mapped")
    return namespace


def lose_power(daemon: RunningDaemon, table: TableCopy) -> None:
    """What was written to the slot table since the copy is gone."""
    daemon.kill()
    table.put_back()
    daemon.start()
    wait_state(daemon, "on")


@pytest.mark.parametrize("is_used_again", [False, True])
def test_cleared_namespace_stays_gone_and_the_others_come_back(
    tmp_path: Path, is_used_again: bool
) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    make_pool(*paths)
    hashes, later = chain_hashes("before", COUNT), chain_hashes("after", COUNT)
    with running_nvme_daemon(*paths) as daemon:
        with client_of(daemon) as client:
            put_all(client, opened(client, "cleared"), hashes)
            put_all(client, opened(client, "kept"), hashes)
            wait_below(daemon, 2 * COUNT)
            table = TableCopy(paths)
            client.clear(opened(client, "cleared"))
            if is_used_again:
                put_all(client, opened(client, "cleared"), later)
            wait_below(daemon, 2 * COUNT if is_used_again else COUNT)
        lose_power(daemon, table)
        assert daemon.metrics()[RECOVERED] == COUNT
        with client_of(daemon) as client:
            cleared, kept = mapped(client, "cleared"), mapped(client, "kept")
            for chain in (hashes, later):
                assert client.match(cleared, chain).matched_count == 0
                assert onboard(client, cleared, chain, wait_seconds=5.0) == 0
                assert got_count(client, cleared, chain) == 0
            assert onboard(client, kept, hashes, wait_seconds=5.0) == COUNT
            assert got_count(client, kept, hashes) == COUNT
            put_all(client, cleared, hashes)
            wait_below(daemon, 2 * COUNT)
            assert not client.check().violations
        daemon.restart()
        wait_state(daemon, "on")
        with client_of(daemon) as client:
            for salt in ("cleared", "kept"):
                assert got_count(client, opened(client, salt), hashes) == COUNT


def test_namespaces_whose_epochs_are_lost_stay_gone(tmp_path: Path) -> None:
    """A lost record may have been that of a Clear."""
    path = tmp_path / "pool"
    make_pool(path)
    hashes = chain_hashes("before", COUNT)
    with running_nvme_daemon(path) as daemon:
        with client_of(daemon) as client:
            put_all(client, opened(client, "lost"), hashes)
            wait_below(daemon, COUNT)
        daemon.kill()
        shutil.rmtree(daemon.state_dir / "epochs")
        daemon.start()
        wait_state(daemon, "on")
        assert daemon.metrics()[RECOVERED] == 0
        with client_of(daemon) as client:
            assert client.match(opened(client, "lost"), hashes).matched_count == 0
