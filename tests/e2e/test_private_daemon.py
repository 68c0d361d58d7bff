"""The daemon that benchmarks and the demo start for themselves never outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier.cli.private_daemon import DIRECTORY, private_daemon

pytestmark = pytest.mark.slow

STARTER = """
import sys, time
from kvtier.cli.private_daemon import private_daemon
with private_daemon({"dram.bytes": "8MiB", "dram.slab_bytes": "2MiB"}) as daemon:
    print(daemon.pid, daemon.socket.parent, flush=True)
    time.sleep(60)
"""


def is_gone(pid: int) -> bool:
    """Whether the process has ended, reaped or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def wait_gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if is_gone(pid):
            return True
        time.sleep(0.02)
    return is_gone(pid)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_daemon_ends_with_the_process_that_started_it(signum: signal.Signals) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    pid_text, directory = starter.stdout.readline().split()
    pid = int(pid_text)
    try:
        assert not is_gone(pid)
        starter.send_signal(signum)
        starter.communicate(timeout=20)
        assert wait_gone(pid, 20)
        if signum != signal.SIGKILL:  # Which leaves nobody to remove the directory.
            assert not Path(directory).exists()
    finally:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)
        subprocess.run(["rm", "-rf", directory])


def test_daemon_that_was_killed_starts_again_on_what_it_left() -> None:
    options = {"dram.bytes": "8MiB", "dram.slab_bytes": "2MiB"}
    options |= {"nvme.paths": f"{DIRECTORY}/nvme", "nvme.bytes": "512MiB"}
    with private_daemon(options) as daemon:
        directory, first = daemon.socket.parent, daemon.pid
        made = (directory / "nvme").stat()
        assert made.st_size >= 512 << 20
        daemon.kill()
        assert is_gone(first)
        daemon.kill()
        daemon.start()
        assert not is_gone(daemon.pid)
        assert daemon.pid != first
        assert (directory / "nvme").stat().st_ino == made.st_ino
        last = daemon.pid
    assert is_gone(last)
    assert not directory.exists()
