"""Work in a thread that may hang in the kernel: whoever waits can stop, and the process can end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T], name: str) -> T:
    """The result of `work`. Cancelled, the thread goes on and nobody hears of its end.

    Not `asyncio.to_thread`: the loop, and the interpreter again, wait for its threads at exit.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(how: Callable[[], None]) -> None:
        if not done.done():
            how()

    def run() -> None:
        how: Callable[[], None]
        try:
            how = partial(done.set_result, work())
        except BaseException as error:  # noqa: BLE001  # Raised again where it is waited for.
            how = partial(done.set_exception, error)
        call_soon(loop, partial(settle, how))

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


def call_soon(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    """From any thread: run `work` on the loop; nothing once the loop is closed."""
    try:
        loop.call_soon_threadsafe(work)
    except RuntimeError:
        if not loop.is_closed():
            raise
