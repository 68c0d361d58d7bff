"""How long an engine has waited for its daemon, and how long for its core."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtier.client import Client

WATCHED_CALLS = ("match", "acquire", "release", "reserve", "commit", "abort")


class TimedClient(Client):
    """Notes how long the connector's calls take, failed ones included."""

    longest: tuple[float, str] = (0.0, "")


def _timed(name: str) -> Callable[..., object]:
    method = getattr(Client, name)

    def call(self: TimedClient, *args: object, **options: object) -> object:
        started = time.monotonic()
        try:
            return method(self, *args, **options)
        finally:
            self.longest = max(self.longest, (time.monotonic() - started, name))

    return call


for _name in WATCHED_CALLS:
    setattr(TimedClient, _name, _timed(_name))


@dataclass
class Jitter:
    """The longest that a thread which only sleeps was kept from its core, meanwhile."""

    seconds_max: float = 0.0
    _ended: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while not self._ended.is_set():
            started = time.monotonic()
            self._ended.wait(0.001)
            self.seconds_max = max(self.seconds_max, time.monotonic() - started - 0.001)

    def end(self) -> None:
        self._ended.set()


@contextmanager
def measured_jitter() -> Iterator[Jitter]:
    jitter = Jitter()
    thread = threading.Thread(target=jitter.watch)
    thread.start()
    try:
        yield jitter
    finally:
        jitter.end()
        thread.join()
