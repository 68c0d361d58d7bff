"""Keeps a shared folder bounded while the daemon runs: its part in electing who evicts there."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvtier.clock import Clock
from kvtier.io.threads import IoThreads
from kvtier.pools.remote.files import MARK_NAME
from kvtier.pools.remote.files_owner import FilesOwner, OwnerRound, OwnerSettings, keep_bounded

log = logging.getLogger(__name__)

# Between two folders of a count: of 256 folders an eighth of a second.
_PAUSE_SECONDS = 0.0005
_RESIGN_SECONDS = 1.0


class ShareKeeper:
    """Belongs to one event loop; the owner to a thread of its own, which may hang in the share."""

    def __init__(self, root: Path, capacity_bytes: int, unique: str, clock: Clock) -> None:
        self._root = root
        self._closing = threading.Event()
        self._owner = FilesOwner(
            OwnerSettings(root, capacity_bytes), unique=unique, clock=clock, pause=self._pause
        )
        self._threads = IoThreads("kvtier-share-owner", count=1)
        self._keeping: asyncio.Task[None] | None = None
        self.last_round = OwnerRound(is_owner=False)
        self.evicted_count, self.evicted_bytes = 0, 0  # By this daemon.
        self.trouble = ""  # Why the last round could not be; for people.

    def start(self) -> None:
        assert self._keeping is None
        self._keeping = asyncio.ensure_future(
            keep_bounded(self._owner, self._threads, self._on_round)
        )

    async def close(self) -> None:
        """Another daemon need not wait for this one's time to be over, if the share answers."""
        self._closing.set()
        if self._keeping is not None:
            self._keeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeping
            resigning = asyncio.get_running_loop().run_in_executor(
                self._threads, partial(_resign, self._owner)
            )
            await asyncio.wait([resigning], timeout=_RESIGN_SECONDS)
        self._threads.shutdown(wait=False)

    def _pause(self) -> None:
        self._closing.wait(_PAUSE_SECONDS)

    def _on_round(self, told: OwnerRound | OSError) -> None:
        if isinstance(told, OSError):
            self.last_round = OwnerRound(is_owner=False)
            self._tell_trouble(told)
            return
        if self.trouble:
            self.trouble = ""
            log.info("remote share answers again", extra={"path": self._root})
        if told.is_owner and not self.last_round.is_owner:
            log.info("remote share is evicted from by this daemon", extra={"path": self._root})
        self.last_round = told
        self.evicted_count += told.evicted_count
        self.evicted_bytes += told.evicted_bytes

    def _tell_trouble(self, error: OSError) -> None:
        """Once, until it is another one."""
        trouble = error.strerror or str(error)
        if isinstance(error, FileNotFoundError) and error.filename == str(self._root / MARK_NAME):
            trouble = f"not mounted, or not made by `kvtier format`: no {MARK_NAME} there"
        if trouble != self.trouble:
            self.trouble = trouble
            log.warning("remote share cannot be used", extra={"path": self._root, "why": trouble})


def _resign(owner: FilesOwner) -> None:
    with suppress(OSError):  # Its time ends by itself.
        owner.resign()
