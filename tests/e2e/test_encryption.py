"""An NVMe tier with a key file, in the daemon: nothing of a block is on the disk to be read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.pools.remote.files import prepare_root
from tests.e2e.test_nvme_daemon import opened
from tests.support.daemon import DaemonFailed, RunningDaemon, running_daemon
from tests.support.known_blocks import chain_hashes, onboard, payload_of
from tests.support.nvme_daemon import (
    client_of,
    got_count,
    make_pool,
    put_all,
    running_nvme_daemon,
    wait_below,
    wait_metric,
    wait_state,
)
from tests.support.processes import eventually

COUNT = 20

pytestmark = pytest.mark.slow


def kvtier(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtier.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_blocks_outlive_the_daemon_and_change_their_key_but_nothing_opens_them_without_it(
    tmp_path: Path,
) -> None:
    pool, keys = tmp_path / "pool", tmp_path / "keys"
    make_pool(pool)
    assert kvtier("key", str(keys)).returncode == 0
    first, second = chain_hashes("sealed", COUNT), chain_hashes("later", COUNT)
    with running_nvme_daemon(pool, options={"nvme.key_file": str(keys)}) as daemon:
        with client_of(daemon) as client:
            namespace = opened(client)
            block_bytes = namespace.spec.shard_bytes
            put_all(client, namespace, first)
            wait_below(daemon, COUNT)
        daemon.kill()
        assert kvtier("key", str(keys)).returncode == 0, "the key is changed"
        daemon.start()
        wait_state(daemon, "on")
        with client_of(daemon) as client:
            namespace = opened(client)
            assert client.match(namespace, first).memory_count == 0
            assert got_count(client, namespace, first) == COUNT
            put_all(client, namespace, second)
            wait_below(daemon, 2 * COUNT)
        assert daemon.terminate() == 0
        disk = pool.read_bytes()
        for one in (*first, *second):
            payload = bytes(payload_of(one, block_bytes))
            assert one not in disk
            assert all(payload[at : at + 32] not in disk for at in (0, block_bytes // 2))
        checked = kvtier("fsck", str(pool), "--key-file", str(keys))
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert f"{2 * COUNT}" in checked.stdout
        keys.write_text(keys.read_text().splitlines()[0] + "\n")  # The first one goes.
        daemon.start()
        wait_state(daemon, "on")
        with client_of(daemon) as client:
            namespace = opened(client)
            assert client.match(namespace, first).matched_count == 0
            assert got_count(client, namespace, second) == COUNT
        assert daemon.terminate() == 0
        keys.unlink()
        with pytest.raises(DaemonFailed, match=r"nvme.key_file: .*keys: No such file"):
            daemon.start()


def test_a_pool_with_a_key_is_empty_to_a_daemon_without_one(tmp_path: Path) -> None:
    pool, keys = tmp_path / "pool", tmp_path / "keys"
    make_pool(pool)
    assert kvtier("key", str(keys)).returncode == 0
    hashes = chain_hashes("sealed", COUNT)
    with running_nvme_daemon(pool, options={"nvme.key_file": str(keys)}) as daemon:
        with client_of(daemon) as client:
            put_all(client, opened(client), hashes)
            wait_below(daemon, COUNT)
        assert daemon.terminate() == 0
    with running_nvme_daemon(pool) as daemon:
        with client_of(daemon) as client:
            namespace = opened(client)
            assert client.match(namespace, hashes).matched_count == 0
            put_all(client, namespace, hashes)
            assert got_count(client, namespace, hashes) == COUNT
        assert "locked_segments" in daemon.log_text


def asked_until(daemon: RunningDaemon, hashes: list[bytes], is_over: Callable[[int], bool]) -> int:
    """How many blocks come from the remote engine, once that is enough."""
    with client_of(daemon) as client:
        namespace = opened(client)
        eventually(lambda: client.arena(namespace).mapped_slot_count > 0, "slots")
        found = [0]

        def is_enough() -> bool:
            found.append(onboard(client, namespace, hashes, wait_seconds=0.5))
            return is_over(found[-1])

        eventually(is_enough, "the engine is asked", 30.0)
        return max(found)


def test_the_remote_engine_keeps_what_only_the_keys_open(tmp_path: Path) -> None:
    share, keys = tmp_path / "share", tmp_path / "keys"
    prepare_root(share)
    assert kvtier("key", str(keys)).returncode == 0
    options = {
        "remote.engine": "files",
        "remote.path": str(share),
        "remote.capacity_bytes": "1GiB",
        "remote.codec": "none",
        "remote.key_file": str(keys),
        "lease.grace_seconds": "0.1",
    }
    hashes = chain_hashes("sealed", COUNT)
    with running_daemon(dram_bytes="16MiB", slab_bytes="4MiB", options=options) as daemon:
        daemon.wait_populated()
        with client_of(daemon) as client:
            namespace = opened(client)
            put_all(client, namespace, hashes)
            assert got_count(client, namespace, hashes) == COUNT
            wait_metric(daemon, 'kvtier_tier_blocks{tier="remote"}', COUNT)
        stored = b"".join(one.read_bytes() for one in share.rglob("*") if one.is_file())
        assert len(stored) > COUNT * namespace.spec.shard_bytes
        assert not any(payload_of(one).tobytes()[:16] in stored for one in hashes)
        assert kvtier("key", str(keys)).returncode == 0, "the key is changed"
        daemon.restart()
        assert asked_until(daemon, hashes, lambda found: found > 0) == COUNT
        keys.write_text(f"9 {'ab' * 32}\n")  # Other keys.
        daemon.restart()
        wrong = 'kvtier_remote_troubles_total{reason="key"}'
        assert asked_until(daemon, hashes, lambda _: daemon.metrics().get(wrong, 0) > 0) == 0
