"""The driver's end of the harness's orders, and what drivers share. Standard library only.

    {"what": "match"}               an order; more members are its arguments
    {"figures": {...}}              its answer
    {"error": "..."}                what went wrong, in words; the driver goes on

Standard output belongs to the answers alone: whatever libraries print goes to standard error, which
the harness keeps in a file. End of input ends the driver, and `close` its daemon.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

BLOCK_BYTES = 2 << 20
BLOCK_COUNT = 32  # 64 MiB are moved at once.
_TERMINATE_SECONDS = 10.0

Figures = dict[str, Any]


class Unmeasurable(Exception):
    """What the order asks for cannot be had from this system: says why."""


class Driver(Protocol):
    """Every order is a method whose name begins with `do_`; it takes the order, returns figures."""

    def close(self) -> None: ...


def serve(driver: Driver) -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The harness ends us in order.
    try:
        for line in sys.stdin:
            answers.write(json.dumps(_answer(driver, json.loads(line))) + "\n")
            answers.flush()
    finally:
        driver.close()
    return 0


def _answer(driver: Driver, order: Figures) -> Figures:
    try:
        return {"figures": getattr(driver, "do_" + order["what"])(order)}
    except Unmeasurable as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever a library raises is told, and judged there.
        return {"error": f"{order['what']}: {type(error).__name__}: {error}"}


class Daemon:
    """One process of the system's, in the driver's process group: the harness kills both."""

    def __init__(self, command: Sequence[str], log: Path, environment: Figures) -> None:
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
            )
        self.pid = self._process.pid

    def check(self) -> None:
        """Raises Unmeasurable when it has ended."""
        if self._process.poll() is not None:
            lines = self._log.read_text(errors="replace").splitlines()[-3:]
            raise Unmeasurable("its daemon has ended: " + " | ".join(lines))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_TERMINATE_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()


def versions(*packages: str) -> dict[str, str]:
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        **{package: metadata.version(package) for package in packages},
    }


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
