"""A private daemon in a temporary directory, removed afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvtier.paths import grpc_socket_path

START_SECONDS_MAX = 30.0


class DaemonFailed(Exception):
    """The daemon ended instead of becoming ready; the message is its log."""


class RunningDaemon:
    """One `kvtier serve` process; `restart` starts it again on the same paths."""

    def __init__(self, directory: Path, options: Mapping[str, str]) -> None:
        self.directory = directory
        self.socket = directory / "kvtier.sock"
        self.state_dir = directory / "state"
        self.ready: dict[str, str] = {}
        self.start_seconds = 0.0
        self.program = [sys.executable, "-m", "kvtier.cli.main", "serve"]
        self._options = dict(options)
        self._process: subprocess.Popen[str] | None = None

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None, "the daemon was not started"
        return self._process

    @property
    def grpc_address(self) -> str:
        return f"unix:{grpc_socket_path(self.socket)}"

    @property
    def log_text(self) -> str:
        return (self.directory / "daemon.log").read_text()

    def command(self) -> list[str]:
        command = [*self.program, "--socket", str(self.socket)]
        command += ["--state-dir", str(self.state_dir)]
        for name, value in self._options.items():
            command += ["--set", f"{name}={value}"]
        return command

    def set_option(self, name: str, value: str) -> None:
        """For the next start."""
        self._options[name] = value

    def start(self) -> None:
        """Returns when the daemon said READY; raises DaemonFailed with its log otherwise."""
        started = time.monotonic()
        with (self.directory / "daemon.log").open("a") as log:
            self._process = subprocess.Popen(
                self.command(), stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None, "stdout is a pipe"
        line = self.process.stdout.readline()
        if not line.startswith("READY"):
            self.kill()
            raise DaemonFailed(self.log_text)
        self.start_seconds = time.monotonic() - started
        self.ready = dict(word.split("=", 1) for word in line.split()[1:])

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._end(signal.SIGKILL)

    def terminate(self, timeout_seconds: float = 30.0) -> int:
        """SIGTERM; the exit code."""
        return self._end(signal.SIGTERM, timeout_seconds)

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> None:
        """SIGSTOP: the daemon hangs."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)

    def http(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.ready['admin']}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics: "name{label="value"}" -> value."""
        samples = {}
        for line in self.http("/metrics").splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def wait_populated(self, timeout_seconds: float = 30.0) -> None:
        """Until every slab of the DRAM budget exists."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            found = self.metrics()
            populated = found['kvtier_tier_populated_bytes{tier="dram"}']
            if populated >= found['kvtier_tier_budget_bytes{tier="dram"}']:
                return
            time.sleep(0.05)
        raise TimeoutError(f"the pool was not populated in {timeout_seconds} s")

    def _end(self, signum: int, timeout_seconds: float = 10.0) -> int:
        process = self.process
        if process.poll() is None:
            process.send_signal(signum)
            if signum != signal.SIGKILL:
                process.send_signal(signal.SIGCONT)
        try:
            return process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()


@contextlib.contextmanager
def running_daemon(
    *,
    dram_bytes: str | int = "64MiB",
    slab_bytes: str | int = "16MiB",
    options: Mapping[str, str] | None = None,
    state_dir: Path | None = None,
    program: Sequence[str] | None = None,
) -> Iterator[RunningDaemon]:
    """A ready daemon; `options` are configuration names such as {"lease.grace_seconds": "0.1"}.

    `state_dir` is the daemon's own unless one is given; `program` is another one than kvtier serve.
    """
    # A short path: a socket's may have 107 characters.
    directory = Path(tempfile.mkdtemp(prefix="kvtier-"))
    settings = {
        "dram.bytes": str(dram_bytes),
        "dram.slab_bytes": str(slab_bytes),
        "admin.address": "127.0.0.1:0",
        "server.drain_seconds": "1",
        **(options or {}),
    }
    daemon = RunningDaemon(directory, settings)
    daemon.state_dir = state_dir or daemon.state_dir
    daemon.program = list(program or daemon.program)
    try:
        daemon.start()
        yield daemon
    finally:
        with contextlib.suppress(AssertionError):
            daemon.kill()
        shutil.rmtree(directory, ignore_errors=True)
