"""The NVMe tier on a block device: a loop device over a file, where one can be had."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cli.main import main
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.daemon import DaemonFailed, running_daemon
from tests.support.known_blocks import chain_hashes, spec_of
from tests.support.marked_blocks import SHARD_BYTES as MARKED_BYTES
from tests.support.marked_blocks import hit_count, mark_of, places_with, put
from tests.support.nvme_daemon import (
    POOL_BYTES,
    client_of,
    got_count,
    put_all,
    running_nvme_daemon,
    wait_below,
    wait_state,
)
from tests.support.processes import eventually

COUNT = 20
PURGED_COUNT = 128  # Two segments.
# What stands at the start of somebody else's disk.
FOREIGN = b"\xeb\x3c\x90mkfs.fat" + bytes(range(256)) * 16

pytestmark = pytest.mark.slow


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """With something else on it."""
    losetup = shutil.which("losetup")
    if losetup is None or os.geteuid() != 0:
        pytest.skip("a loop device needs losetup and root")
    file = tmp_path / "disk"
    file.write_bytes(FOREIGN)
    os.truncate(file, POOL_BYTES)
    made = subprocess.run(
        [losetup, "--find", "--show", str(file)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"no loop device: {made.stderr.strip()}")
    path = Path(made.stdout.strip())
    yield path
    subprocess.run([losetup, "--detach", str(path)], check=True)


def formatted(device: Path, *words: str) -> int:
    return main(["format", str(device), "--segment-bytes", "4MiB", "--json", *words])


def test_blocks_on_a_device_outlive_kill_9_and_a_second_daemon_is_refused(device: Path) -> None:
    assert formatted(device, "--force") == 0
    hashes = chain_hashes("on a device", COUNT)
    with running_nvme_daemon(device) as daemon:
        with client_of(daemon) as client:
            namespace = client.open_namespace(spec_of())
            assert client.wait_namespace(namespace, 10)
            put_all(client, namespace, hashes)
            wait_below(daemon, COUNT)
        with (
            pytest.raises(DaemonFailed, match=r"in use|locked|another"),
            running_nvme_daemon(device),
        ):
            pass
        daemon.kill()
        daemon.start()
        wait_state(daemon, "on")
        with client_of(daemon) as client:
            namespace = client.open_namespace(spec_of())
            assert client.wait_namespace(namespace, 10)
            found = client.match(namespace, hashes)
            assert (found.matched_count, found.memory_count) == (COUNT, 0)
            assert got_count(client, namespace, hashes) == COUNT


def test_a_purge_has_the_device_drop_what_was_there(device: Path, tmp_path: Path) -> None:
    """Holes: of a loop device they are those of the file behind it."""
    behind = tmp_path / "disk"
    assert formatted(device, "--force") == 0
    with running_nvme_daemon(device) as daemon, client_of(daemon) as client:
        mine, others = put(client, "a", PURGED_COUNT), put(client, "b", COUNT)
        wait_below(daemon, PURGED_COUNT + COUNT)
        pid = daemon.process.pid
        for owner in ("a", "b"):
            found = places_with(mark_of(owner), pid, [device, behind])
            assert {str(device), str(behind)} <= set(found)
        before = behind.stat().st_blocks
        [of_a] = [one for one in client.stats().namespaces if one.model == "model of a"]
        asked = client.purge(pb.PurgeRequest(namespace_id=of_a.namespace_id))
        eventually(
            lambda: bool(client.purge(pb.PurgeRequest(purge=asked.purge)).report), "it ends", 30.0
        )
        assert places_with(mark_of("a"), pid, [device, behind]) == []
        dropped_bytes = 512 * (before - behind.stat().st_blocks)
        assert dropped_bytes >= 0.9 * PURGED_COUNT * MARKED_BYTES, "they were written over instead"
        assert hit_count(client, "a", mine) == 0
        assert hit_count(client, "b", others) == COUNT


def test_a_device_that_holds_something_else_stays_as_it_is(
    device: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert formatted(device) != 0
    assert "--force" in capsys.readouterr().err
    options = {"nvme.paths": str(device), "nvme.bytes": "512MiB"}
    with (
        pytest.raises(DaemonFailed, match="kvtier format"),
        running_daemon(dram_bytes="32MiB", slab_bytes="4MiB", options=options),
    ):
        pass
    with device.open("rb") as file:
        assert file.read(len(FOREIGN)) == FOREIGN
