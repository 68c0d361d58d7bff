"""Real Redis or Valkey servers for tests: on free ports, in private folders, ended with them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.cli.bench_servers import free_port, redis_binary

BINARY = redis_binary()
CLIENT = shutil.which("valkey-cli") or shutil.which("redis-cli")

needs_redis = pytest.mark.skipif(
    BINARY is None or CLIENT is None, reason="no redis-server or valkey-server is installed"
)


class RedisServer:
    """One server process; `arguments` are further options of its command line."""

    def __init__(self, folder: Path, arguments: Sequence[str] = (), *, tls: bool = False) -> None:
        self.port = free_port()
        self._folder = folder
        self._tls = tls
        folder.mkdir(parents=True, exist_ok=True)
        port = ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        assert BINARY is not None
        self._command = [BINARY, "--bind", "127.0.0.1", *port, "--dir", str(folder)]
        self._command += ["--save", "", "--appendonly", "no", "--daemonize", "no", *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        assert self._process is None or self._process.poll() is not None, "it runs already"
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 20.0
        while True:
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline, "the server does not listen"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.01)

    def ask(self, *words: str, more: Sequence[str] = ()) -> str:
        """By the server's own client."""
        assert CLIENT is not None
        done = subprocess.run(
            [CLIENT, "-p", str(self.port), *more, *words],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return done.stdout.strip()

    def kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait(10)

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def redis_server(
    folder: Path, arguments: Sequence[str] = (), *, tls: bool = False
) -> Iterator[RedisServer]:
    server = RedisServer(folder, arguments, tls=tls)
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def redis_cluster(folder: Path, count: int = 3) -> Iterator[list[RedisServer]]:
    """Primaries only, slots spread evenly."""
    servers: list[RedisServer] = []
    try:
        for number in range(count):
            arguments = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"]
            arguments += ["--cluster-require-full-coverage", "no"]
            servers.append(RedisServer(folder / str(number), arguments))
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        servers[0].ask("--cluster", "create", *addresses, "--cluster-yes")
        deadline = time.monotonic() + 20.0
        while any("cluster_state:ok" not in one.ask("cluster", "info") for one in servers):
            assert time.monotonic() < deadline, "the cluster does not come up"
            time.sleep(0.05)
        yield servers
    finally:
        for server in servers:
            server.kill()
