"""Signals that end a program, held back where the stack could not be unwound in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """What arrives inside is handled at the end: a process being started is not lost.

    Handlers, not a signal mask: a child would inherit the mask.
    """
    arrived: list[int] = []

    def note(signum: int, _frame: FrameType | None) -> None:
        arrived.append(signum)

    before = {one: signal.signal(one, note) for one in _ENDING}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    for signum in arrived:
        signal.raise_signal(signum)
