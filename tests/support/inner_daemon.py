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
from pathlib import Path
from typing import TypeVar

import uvloop

from kvtier.config import Config
from kvtier.server.app import run_daemon
from kvtier.server.build import plan_memory
from kvtier.server.nvme_paths import OpenDriver

T = TypeVar("T")


def live(config: Config, open_driver: OpenDriver, script: Callable[[], T]) -> T:
    """Start, run `script` in a thread, end in order; what it returns or raises.

    Raises ConfigError when the start is refused.
    """
    before = threading.excepthook
    socket = Path(config.server.socket)
    over = threading.Event()
    done: list[T] = []
    failed: list[BaseException] = []

    def play() -> None:
        while not socket.exists():  # Ends: the daemon starts, or its start is refused.
            if over.is_set():
                return
            time.sleep(0.005)
        try:
            done.append(script())
        except BaseException as error:  # noqa: BLE001  # Raised where the script is waited for.
            failed.append(error)
        if not over.is_set():
            signal.raise_signal(signal.SIGTERM)

    player = threading.Thread(target=play, name="script")
    player.start()
    try:
        exit_code = _run(config, open_driver)
    finally:
        over.set()
        player.join()
        threading.excepthook = before
        gc.unfreeze()  # The daemon thinks that it lives as long as the process.
    if failed:
        raise failed[0]
    assert exit_code == 0, "the daemon ended with a mistake of its own"
    return done[0]


def _run(config: Config, open_driver: OpenDriver) -> int:
    server = config.server
    plan = plan_memory(
        config, Path(server.socket), Path(server.state_dir), generation=secrets.randbits(63) + 1
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_daemon(config, plan, open_driver))
