"""Does the background work of eviction policies that learn, in a thread."""

from __future__ import annotations

import asyncio

from kvtier.core.events import Refitted
from kvtier.core.instructions import Refit
from kvtier.server.core_loop import CoreLoop


class Refitting:
    """A policy asks for no more before it was answered, or a good while has passed."""

    def __init__(self, core: CoreLoop) -> None:
        self._core = core
        self._tasks: asyncio.TaskGroup | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def on_refit(self, asked: Refit) -> None:
        assert self._tasks is not None, "a refit before the start"
        self._tasks.create_task(self._run(asked))

    async def _run(self, asked: Refit) -> None:
        result = await asyncio.to_thread(asked.work)
        self._core.post(Refitted(asked.namespace, asked.epoch, result))
