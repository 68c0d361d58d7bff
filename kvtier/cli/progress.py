"""One line on standard error that says how far something has come; only where people look."""

from __future__ import annotations

import sys
import time

SECONDS_APART = 0.2
BAR_CHARS = 30


class Progress:
    """`total`: of what is counted, if that is known."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._total = what, total
        self._shown_at = 0.0
        self._began = time.monotonic()
        self._is_seen = sys.stderr.isatty()

    def show(self, count: int) -> None:
        now = time.monotonic()
        if not self._is_seen or now - self._shown_at < SECONDS_APART:
            return
        self._shown_at = now
        if self._total:
            share = count / self._total
            done = int(BAR_CHARS * share)
            left = (now - self._began) * (1 - share) / share if share else 0.0
            bar = "#" * done + "." * (BAR_CHARS - done)
            text = f"[{bar}] {count:,} of {self._total:,} {self._what}, {left:.0f} s left"
        else:
            text = f"{count:,} {self._what}"
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()

    def end(self) -> None:
        if self._is_seen:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
