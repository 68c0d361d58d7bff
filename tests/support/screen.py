"""A program in a real pseudo-terminal, and what a terminal emulator shows of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyte

READ_BYTES = 65_536


class ScreenProgram:
    """One program and its terminal; `lines` is what a person would see."""

    def __init__(
        self, command: Sequence[str], *, columns: int, rows: int, env: Mapping[str, str]
    ) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._ours, theirs = pty.openpty()
        self._set_size(columns, rows)
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs  # Open here too: what was written is read after the program's end.
        self.process = subprocess.Popen(
            list(command),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**env, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def settings(self) -> list[object]:
        """Of the terminal, as tcgetattr tells them."""
        return list(termios.tcgetattr(self._theirs))

    def send(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """As a terminal's window does: the size first, then SIGWINCH, which the kernel sends."""
        self._set_size(columns, rows)
        self._screen.resize(rows, columns)

    def wait_for(self, is_shown: Callable[[str], object], what: str, seconds: float = 10.0) -> str:
        """Read until the screen satisfies `is_shown`; what is on it then."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._read(0.05)
            if is_shown(self.text):
                return self.text
        raise TimeoutError(f"{what} was not shown within {seconds} s:\n{self.text}")

    def wait_end(self, seconds: float = 10.0) -> int:
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.05)
        return self.process.wait(0.1)

    def _read(self, seconds: float) -> None:
        ready, _, _ = select.select([self._ours], [], [], seconds)
        if ready:
            self._stream.feed(os.read(self._ours, READ_BYTES))

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@contextlib.contextmanager
def on_screen(
    command: Sequence[str], *, columns: int = 80, rows: int = 24, env: Mapping[str, str]
) -> Iterator[ScreenProgram]:
    program = ScreenProgram(command, columns=columns, rows=rows, env=env)
    try:
        yield program
    finally:
        program.close()
