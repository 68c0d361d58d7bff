"""A real Mooncake master for tests: on free ports, ended with the test."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cli.bench_servers import free_port, mooncake_binary

BINARY = mooncake_binary()
needs_mooncake = pytest.mark.skipif(
    BINARY is None, reason="no wheel of mooncake-transfer-engine is installed"
)


class MooncakeMaster:
    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.port = free_port()
        self._host = host
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    def start(self) -> None:
        assert self._process is None or self._process.poll() is not None, "it runs already"
        command = [str(BINARY), f"--rpc_port={self.port}", f"--rpc_address={self._host}"]
        command += ["--metrics_host=127.0.0.1", f"--metrics_port={free_port()}"]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 20.0
        while True:
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline, "the master does not listen"
            with contextlib.suppress(OSError), socket.create_connection((self._host, self.port)):
                return
            time.sleep(0.02)

    def kill(self) -> None:
        assert self._process is not None
        self.resume()
        self._process.kill()
        self._process.wait(10)

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def mooncake_master(folder: Path) -> Iterator[MooncakeMaster]:
    master = MooncakeMaster(folder)
    try:
        yield master
    finally:
        master.kill()
