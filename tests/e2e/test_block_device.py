"""The NVMe tier on a block device: a loop device over a file, where one can be had."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cli.main import main
from tests.support.daemon import DaemonFailed, running_daemon
from tests.support.known_blocks import chain_hashes, spec_of
from tests.support.nvme_daemon import (
    POOL_BYTES,
    client_of,
    got_count,
    put_all,
    running_nvme_daemon,
    wait_below,
    wait_state,
)

COUNT = 20
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
