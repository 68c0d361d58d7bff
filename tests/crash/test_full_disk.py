"""A full disk under state_dir: what needs a record fails by name, everything else goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import KVTierError
from tests.support.daemon import running_daemon
from tests.support.known_blocks import chain_hashes, spec_of
from tests.support.observer import observing
from tests.support.processes import eventually


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)]
    tried = subprocess.run(words, capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"mount is not permitted here: {tried.stderr.strip()}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill_disk(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        with contextlib.suppress(OSError):
            while True:
                os.write(fd, bytes(4096))
        with pytest.raises(OSError) as caught:
            os.write(fd, b"x")
        assert caught.value.errno == errno.ENOSPC
    finally:
        os.close(fd)


def test_full_disk_makes_clear_fail_by_name_and_changes_nothing(small_disk: Path) -> None:
    kept, state_dir = chain_hashes("kept", 3), small_disk / "state"
    with (
        running_daemon(dram_bytes="8MiB", slab_bytes="4MiB", state_dir=state_dir) as daemon,
        observing(daemon.socket) as observer,
        observing(daemon.socket) as other,
    ):
        client, namespace = observer.client, observer.namespace
        assert namespace.state is not None
        epoch = namespace.state.epoch
        assert observer.offload("kept", 3) == 3
        fill_disk(small_disk / "fill")
        for _ in range(2):
            with pytest.raises(KVTierError, match=r"No space left on device.*nothing was changed"):
                client.clear(namespace)
        assert observer.read(kept) == 3
        assert client.acquire(namespace, kept).epoch == epoch
        fresh = other.client.open_namespace(spec_of("fresh"))
        eventually(lambda: fresh.error is not None, "the fresh namespace is refused")
        assert "the epoch cannot be recorded" in str(fresh.error)
        assert observer.offload("more", 3) == 3, "everything else goes on"
        assert [one.name for one in (state_dir / "epochs").iterdir()] == [
            f"{namespace.state.fingerprint.hex()}.epoch"
        ], "nothing half-written stays"
        (small_disk / "fill").unlink()
        cleared = client.clear(namespace)
        assert cleared != epoch
        assert client.match(namespace, kept).matched_count == 0
        daemon.restart()
        observer.wait_back()
        assert namespace.state.epoch == cleared
