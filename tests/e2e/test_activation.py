"""A daemon that is handed its listening sockets, as systemd hands them; without systemd."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.paths import lane_socket_path

pytestmark = pytest.mark.slow

SEQPACKET, STREAM = socket.SOCK_SEQPACKET, socket.SOCK_STREAM
# What systemd does between fork and exec.
LAUNCH = """
import os, sys
for number, fd in enumerate(map(int, sys.argv[1:3]), start=3):
    os.dup2(fd, number)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"}
os.execv(sys.executable, [sys.executable, "-m", "kvtier.cli.main", *sys.argv[3:]])
"""


class Manager:
    """Listens for the daemon and starts it; what waits in the sockets outlives each one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kvtier.sock"
        self._folder = folder
        self._listeners = [
            (socket.socket(socket.AF_UNIX, SEQPACKET), self.path),
            (socket.socket(socket.AF_UNIX, STREAM), lane_socket_path(self.path)),
        ]
        for listener, path in self._listeners:
            listener.bind(str(path))
            listener.listen(16)

    @contextlib.contextmanager
    def daemon(self) -> Iterator[subprocess.Popen[str]]:
        """Ready; killed in the end, if it is still there."""
        # Out of the way of 3 and 4.
        fds = [
            fcntl.fcntl(listener.fileno(), fcntl.F_DUPFD, 100) for listener, _ in self._listeners
        ]
        options: dict[str, object] = {"--socket": self.path}
        options |= {"--state-dir": self._folder / "state"}
        options |= {"--dram-bytes": "32MiB", "--admin": "off"}
        words = [str(word) for option in options.items() for word in option]
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *map(str, fds), "serve", *words],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
        )
        for fd in fds:
            os.close(fd)
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("READY")
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def close(self) -> None:
        for listener, _ in self._listeners:
            listener.close()


def check(path: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "kvtier.cli.main", "check", "--socket", str(path)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_who_waits_is_served_by_the_next_daemon_and_who_has_gone_does_no_harm(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    manager = Manager(tmp_path_factory.mktemp("s"))
    try:
        with manager.daemon() as first:
            first.send_signal(signal.SIGTERM)
            assert first.wait(20) == 0
        assert manager.path.is_socket(), "the manager still listens"
        for _ in range(8):  # They gave up.
            with socket.socket(socket.AF_UNIX, SEQPACKET) as gone:
                gone.connect(str(manager.path))
        waiting = check(manager.path)
        time.sleep(0.3)
        with manager.daemon() as second:
            told, _ = waiting.communicate(timeout=20)
            assert waiting.returncode == 0, told
            assert second.poll() is None
    finally:
        manager.close()
