"""A daemon that is killed while it owes a clear to the remote engine, and started again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvtier.client import Client, ClientSettings
from kvtier.errors import Unavailable
from kvtier.pools.remote.files import prepare_root
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.known_blocks import chain_hashes, offload, onboard, spec_of
from tests.support.nvme_daemon import wait_metric
from tests.support.processes import eventually

CHAIN = 8
EPOCHS = "kvtier_remote_epochs_count"
KNOWN = 'kvtier_tier_blocks{tier="remote"}'
# A search whose tier is on takes milliseconds; the clear that is owed takes the others' 10 s.
OFF_SECONDS = 1.5
PATIENT = ClientSettings(timeout_seconds=5.0, admin_timeout_seconds=30.0)


def hits(daemon: RunningDaemon, hashes: list[bytes]) -> int:
    with Client(daemon.socket, settings=PATIENT) as client:
        namespace = client.open_namespace(spec_of())
        assert client.wait_connected(10)
        eventually(lambda: client.arena(namespace).mapped_slot_count > 0, "slots")
        deadline = time.monotonic() + OFF_SECONDS
        while time.monotonic() < deadline:
            if found := onboard(client, namespace, hashes, wait_seconds=0.3):
                return found
            time.sleep(0.1)
    return 0


def test_what_a_clear_voided_stays_gone_after_kill_9_though_the_engine_was_not_told(
    tmp_path: Path,
) -> None:
    root = tmp_path / "share"
    prepare_root(root)
    options = {
        "remote.engine": "files",
        "remote.path": str(root),
        "remote.capacity_bytes": "1GiB",
        "lease.grace_seconds": "0.1",
    }
    hashes = chain_hashes("cleared", CHAIN)
    with running_daemon(dram_bytes="8MiB", slab_bytes="2MiB", options=options) as daemon:
        daemon.wait_populated()
        with Client(daemon.socket, settings=PATIENT) as client:
            namespace = client.open_namespace(spec_of())
            assert client.wait_connected(10)
            eventually(lambda: client.arena(namespace).mapped_slot_count > 0, "slots")
            wait_metric(daemon, EPOCHS, 1)
            assert offload(client, namespace, hashes) == CHAIN
            assert onboard(client, namespace, hashes) == CHAIN
            wait_metric(daemon, KNOWN, CHAIN)
        daemon.restart()
        assert hits(daemon, hashes) == CHAIN, "the engine has it: the test can fail"
        root.rename(tmp_path / "aside")  # As if the share were not mounted.
        with Client(daemon.socket, settings=PATIENT) as client:
            namespace = client.open_namespace(spec_of())
            assert client.wait_connected(10)
            with pytest.raises(Unavailable, match="could not be told"):
                client.clear(namespace)
            client.match(namespace, hashes)  # Who was told so keeps its session.
        daemon.kill()
        (tmp_path / "aside").rename(root)
        daemon.start()
        assert hits(daemon, hashes) == 0
        assert "remote clear is owed" in daemon.log_text
        assert daemon.metrics()[EPOCHS] == 0
        assert list((daemon.state_dir / "owed_clears").iterdir()), "until it was paid"
