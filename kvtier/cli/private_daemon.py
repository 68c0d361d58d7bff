"""A daemon of a benchmark's or the demo's own: private directory, removed whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from kvtier.cli.interrupts import deferred_interrupts
from kvtier.errors import ConfigError, Unavailable

DIRECTORY = "{directory}"
TERMINATE_SECONDS = 10.0
_EXIT_USAGE = 2  # Of `kvtier serve`.
_LOG_LINES = 5  # Shown when the daemon did not start.


@dataclass(slots=True)
class BenchDaemon:
    """The daemon a benchmark talks to; `start_seconds` from spawn to its READY line."""

    socket: Path
    pid: int
    start_seconds: float


class PrivateDaemon(BenchDaemon):
    """One that is started here; started again after `kill`, it finds what it had left."""

    def __init__(self, directory: Path, options: Mapping[str, str]) -> None:
        super().__init__(directory / "kvtier.sock", pid=0, start_seconds=0.0)
        self._directory = directory
        self._options = {
            name: value.replace(DIRECTORY, str(directory)) for name, value in options.items()
        }
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when it is ready. Raises ConfigError, Unavailable."""
        started = time.monotonic()
        with deferred_interrupts():
            self._process = _spawn(self._directory, self._options)
        _wait_ready(self._process, self._directory)
        self.pid, self.start_seconds = self._process.pid, time.monotonic() - started

    def kill(self) -> None:
        """kill -9, and wait until it is gone; nothing happens to one that is."""
        if self._process is not None:
            self._process.kill()
            end_process(self._process)

    def end(self) -> None:
        if self._process is not None:
            end_process(self._process)


@contextlib.contextmanager
def private_daemon(options: Mapping[str, str]) -> Iterator[PrivateDaemon]:
    """`options` are names of docs/configuration.md. No process and no file is left behind.

    DIRECTORY in a value stands for the daemon's own directory.
    """
    with signals_as_exceptions():
        # A short path: a socket's may have 107 characters.
        directory = Path(tempfile.mkdtemp(prefix="kvtier-bench-"))
        daemon = PrivateDaemon(directory, options)
        try:
            daemon.start()
            yield daemon
        finally:
            daemon.end()
            shutil.rmtree(directory, ignore_errors=True)


def end_process(process: subprocess.Popen[Any]) -> None:
    """SIGTERM, and SIGKILL when that was not enough; returns when the process is gone."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _spawn(directory: Path, options: Mapping[str, str]) -> subprocess.Popen[str]:
    settings = {
        "server.socket": str(directory / "kvtier.sock"),
        "server.state_dir": str(directory / "state"),
        "server.drain_seconds": "0",
        "admin.address": "off",
        **options,
    }
    words = ["serve"]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    with (directory / "daemon.log").open("a") as log:
        return tied_process(words, log)


def tied_process(words: Sequence[str], stderr: IO[str] | int) -> subprocess.Popen[str]:
    """`kvtier WORDS`, which ends with us; its standard output is ours to read."""
    # Its own session: ctrl-C goes to us alone, and we end it in order.
    return subprocess.Popen(
        [sys.executable, "-m", "kvtier.cli.tied", str(os.getpid()), *words],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


def _wait_ready(process: subprocess.Popen[str], directory: Path) -> None:
    assert process.stdout is not None, "stdout is a pipe"
    line = process.stdout.readline()
    if not line.startswith("READY"):
        log = (directory / "daemon.log").read_text().splitlines()[-_LOG_LINES:]
        text = "the private daemon did not start: " + " | ".join(log)
        # It blames its options, and those follow from our arguments.
        raise ConfigError(text) if process.wait() == _EXIT_USAGE else Unavailable(text)


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack, so that what was started is removed."""

    def unwind(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = {one: signal.signal(one, unwind) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
