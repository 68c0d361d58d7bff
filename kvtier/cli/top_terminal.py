"""The terminal of `kvtier top`: keys as words, and what wakes the picture up."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_KEYS = {b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\t": "tab"}
_READ_BYTES = 256


class Terminal:
    """Standard input, a key at a time; signals and other threads end a wait, too."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno()
        self._waking, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def wake(self) -> None:
        """From any thread: the wait under way ends."""
        with suppress(BlockingIOError):  # Full: it will wake up anyway.
            os.write(self._wake, b"\0")

    def wait_keys(self, timeout_seconds: float) -> list[str]:
        """The keys that came; none when the time is over, or something else woke it."""
        ready, _, _ = select.select([self._fd, self._waking], [], [], timeout_seconds)
        if self._waking in ready:
            with suppress(BlockingIOError):
                os.read(self._waking, _READ_BYTES)
        if self._fd not in ready:
            return []
        data = os.read(self._fd, _READ_BYTES)
        return keys_of(data) if data else ["q"]  # The terminal has gone.

    @contextmanager
    def keys_at_once(self) -> Iterator[None]:
        """Without echo and without waiting for a whole line; as it was afterwards."""
        before = termios.tcgetattr(self._fd)
        handlers: dict[int, object] = {}
        tty.setcbreak(self._fd)
        try:
            for number in (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP):
                handlers[number] = signal.signal(number, _on_signal)
            woken = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(woken)
        finally:
            for one, handler in handlers.items():
                signal.signal(one, handler)  # type: ignore[arg-type]  # As it was given to us.
            termios.tcsetattr(self._fd, termios.TCSADRAIN, before)

    def close(self) -> None:
        os.close(self._waking)
        os.close(self._wake)


def keys_of(data: bytes) -> list[str]:
    """`b"p\\x1b[A"` -> p, up. What nobody knows is left out."""
    keys = []
    while data:
        known = next((sequence for sequence in _KEYS if data.startswith(sequence)), None)
        if known is not None:
            keys.append(_KEYS[known])
            data = data[len(known) :]
        elif data.startswith(b"\x1b"):
            data = _after_sequence(data)
        else:
            keys.append(data[:1].decode("latin-1"))
            data = data[1:]
    return keys


def _after_sequence(data: bytes) -> bytes:
    """Past an escape sequence that means nothing here."""
    if data[1:2] not in (b"[", b"O"):
        return data[1:]
    end = next((place for place in range(2, len(data)) if 0x40 <= data[place] <= 0x7E), len(data))
    return data[end + 1 :]


def _on_signal(number: int, stack: object) -> None:
    """A new size has only to wake the picture up; the others end it, the terminal as it was."""
    if number != signal.SIGWINCH:
        raise SystemExit(128 + number)
