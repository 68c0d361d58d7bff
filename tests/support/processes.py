"""Starts, kills, stops and asks engine processes; see engine_process.py for what they can do."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ANSWER_SECONDS_MAX = 60.0

Fields = dict[str, Any]


class CallFailed(Exception):
    """A verb raised in the engine process; the message begins with the error's name."""


def eventually(
    condition: Callable[[], bool], what: str, seconds: float = 30.0, step: float = 0.02
) -> None:
    """Wait until the condition holds; fail with `what` did not come about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds} s: {what}"
        time.sleep(step)


class Engine:
    """One engine process."""

    def __init__(
        self,
        socket: Path,
        *,
        engine_id: bytes | None = None,
        pid_namespace: bool = False,
        **options: Any,
    ) -> None:
        """Started, but perhaps not connected: `wait_started`.

        `options` are those of engine_process.py: role, name, salt, timeout_seconds, maps_segments.
        """
        self.engine_id = engine_id or os.urandom(16)
        self.pid_namespace = pid_namespace
        self.events: list[Fields] = []
        self._lines: queue.Queue[Fields | None] = queue.Queue()
        command = ["unshare", "--pid", "--fork"] if pid_namespace else []
        command += [sys.executable, "-m", "tests.support.engine_process", str(socket)]
        command += ["--engine-id", self.engine_id.hex()]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the engine itself, in this process's PID namespace."""
        if not self.pid_namespace:
            return self.process.pid
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(path.read_text().split()[0])

    def _read(self) -> None:
        assert self.process.stdout is not None, "stdout is a pipe"
        for line in self.process.stdout:
            fields = json.loads(line)
            if "event" in fields:
                self.events.append(fields)  # Atomic; read by the test's thread.
            else:
                self._lines.put(fields)
        self._lines.put(None)

    def of_kind(self, kind: str) -> list[Fields]:
        return [one for one in list(self.events) if one["event"] == kind]

    def wait_started(self) -> Engine:
        def has_started() -> bool:
            assert self.process.poll() is None, "the engine ended instead of starting"
            return bool(self.of_kind("started"))

        eventually(has_started, "the engine is connected", 90.0, 0.005)
        return self

    def send(self, verb: str, **fields: Any) -> None:
        assert self.process.stdin is not None, "stdin is a pipe"
        self.process.stdin.write(json.dumps({"do": verb, **fields}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Fields:
        fields = self._lines.get(timeout=ANSWER_SECONDS_MAX)
        assert fields is not None, "the engine process ended without an answer"
        if "error" in fields:
            raise CallFailed(f"{fields['error']}: {fields['text']}")
        return fields

    def ask(self, verb: str, **fields: Any) -> Fields:
        self.send(verb, **fields)
        return self.answer()

    def stop(self) -> None:
        """SIGSTOP, and wait until every thread has stopped."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: _is_stopped(pid), "the engine has stopped")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, wait until the process is gone and everything it printed is read."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, IndexError, FileNotFoundError):
                os.kill(self.pid, signal.SIGKILL)
        self.process.wait(30)
        self._reader.join(30)
        assert not self._reader.is_alive(), "a child of the engine holds its stdout"
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def end(self) -> None:
        """Bye."""
        self.ask("end")
        self.process.wait(30)


class Engines:
    """Makes engines and sees to it that none outlives the test."""

    def __init__(self) -> None:
        self._made: list[Engine] = []
        self._children: list[int] = []

    def launch(self, socket: Path, **options: Any) -> Engine:
        """Return at once."""
        engine = Engine(socket, **options)
        self._made.append(engine)
        return engine

    def start(self, socket: Path, **options: Any) -> Engine:
        return self.launch(socket, **options).wait_started()

    def adopt_child(self, pid: int) -> None:
        """A child of an engine that may outlive it."""
        self._children.append(pid)

    def close(self) -> None:
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for engine in self._made:
            engine.kill()


@contextlib.contextmanager
def engine_processes() -> Iterator[Engines]:
    engines = Engines()
    try:
        yield engines
    finally:
        engines.close()


def need_pid_namespaces() -> None:
    """Skip where no PID namespace may be made."""
    tried = subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"unshare --pid is not permitted here: {tried.stderr.strip()}")


def _is_stopped(pid: int) -> bool:
    """Whether no thread of the process runs any more."""
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    states = {(one / "stat").read_text().rpartition(")")[2].split()[0] for one in threads}
    return states == {"T"}
