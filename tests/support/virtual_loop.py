"""An event loop whose time jumps to the next timer: hours of sleeps in milliseconds.

Nothing under it may use threads or sockets. A wait that no timer ends is a deadlock, and told.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Adds the time it was asked to wait to the loop's clock, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("deadlock: every task waits and no timer is set")
        if not ready and timeout is not None and timeout > 0:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class LoopClock:
    """A kvtier.clock.Clock that follows the running loop; it may be slow or fast."""

    def __init__(self, rate: float = 1.0) -> None:
        self._rate = rate

    def now(self) -> float:
        return self._rate * asyncio.get_running_loop().time()

    def now_ns(self) -> int:
        return round(self.now() * 1e9)


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
