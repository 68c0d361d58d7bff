"""The harness's end of a driver: orders with a time limit, an end that leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.cli.interrupts import deferred_interrupts

Figures = dict[str, Any]
_TERMINATE_SECONDS = 15.0
_LOG_LINES = 3


class NotMeasured(Exception):
    """Why there is no figure; the text goes into the report."""


class Link:
    """One driver. After an answer that did not come in time it has no driver any more."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._rest = b""

    def ask(self, what: str, *, seconds_max: float, **facts: object) -> Figures:
        """Raises NotMeasured when the driver says why not, has ended, or is not done in time.

        The driver is told of a shorter limit: it can say what it waited for.
        """
        order = json.dumps({"what": what, "seconds_max": 0.8 * seconds_max, **facts}) + "\n"
        assert self._process.stdin is not None, "stdin is a pipe"
        try:
            self._process.stdin.write(order.encode())
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise NotMeasured(self._last_words()) from None
        answer = json.loads(self._line(what, seconds_max))
        if "error" in answer:
            raise NotMeasured(answer["error"])
        figures: Figures = answer["figures"]
        return figures

    def _line(self, what: str, seconds_max: float) -> bytes:
        assert self._process.stdout is not None, "stdout is a pipe"
        deadline = time.monotonic() + seconds_max
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not waiting.select(max(0.0, deadline - time.monotonic())):
                    os.killpg(self._process.pid, signal.SIGKILL)  # It may be waiting for ever.
                    self.end()
                    raise NotMeasured(f"no answer to {what} in {seconds_max:g} s")
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise NotMeasured(self._last_words())
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self.end()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line]
        return " | ".join(["its driver has ended", *lines[-_LOG_LINES:]])

    def end(self) -> None:
        """By the end of its input; then all that is left of its process group, by force."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            assert self._process.stdin is not None, "stdin is a pipe"
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_TERMINATE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def started(
    name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Link]:
    """A driver in a session of its own. Raises NotMeasured when there is no such program."""
    with deferred_interrupts(), log.open("ab") as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise NotMeasured(f"{command[0]}: {error.strerror}") from None
        link = Link(name, process, log)
    try:
        yield link
    finally:
        link.end()
