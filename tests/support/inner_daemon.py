"""A daemon in this process, one life after the other; its drivers are the test's own.

The daemon has the main thread, as in its own process, and the test's script another one.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import uvloop

from kvtier.config import Config
from kvtier.server.app import run_daemon
from kvtier.server.nvme_paths import OpenDriver
from kvtier.server.plan import Plan, plan_memory
from kvtier.server.threads import call_soon

T = TypeVar("T")


def live(config: Config, open_driver: OpenDriver, script: Callable[[], T]) -> T:
    """Start, run `script` in a thread, end in order; what it returns or raises.

    Raises ConfigError when the start is refused.
    """
    before = threading.excepthook
    over = threading.Event()
    done: list[T] = []
    failed: list[BaseException] = []

    def play(loop: asyncio.AbstractEventLoop) -> None:
        while not Path(config.server.socket).exists():  # Ends: it starts, or it is refused.
            if over.is_set():
                return
            time.sleep(0.005)
        try:
            done.append(script())
        except BaseException as error:  # noqa: BLE001  # Raised where the script is waited for.
            failed.append(error)
        # On the loop, where somebody listens for the signal as long as the loop runs.
        call_soon(loop, partial(signal.raise_signal, signal.SIGTERM))

    async def body() -> int:
        player = threading.Thread(target=play, args=(asyncio.get_running_loop(),), name="script")
        player.start()
        try:
            return await run_daemon(config, _plan(config), open_driver)
        finally:
            over.set()
            await asyncio.to_thread(player.join)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            exit_code = runner.run(body())
    finally:
        threading.excepthook = before
        gc.unfreeze()  # The daemon thinks that it lives as long as the process.
    assert exit_code == 0, "the daemon ended with a mistake of its own"
    if failed:
        raise failed[0]
    return done[0]


def _plan(config: Config) -> Plan:
    server = config.server
    return plan_memory(
        config, Path(server.socket), Path(server.state_dir), generation=secrets.randbits(63) + 1
    )
