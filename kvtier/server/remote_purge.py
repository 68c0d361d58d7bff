"""The remote engine's part in a purge: every node is told, and what lies there is deleted.

A namespace that is open here is cleared among the nodes as `Clear` does it; one that is not, by a
view of its epoch that is made for this. Only then values are deleted, so nobody puts new ones under
the old epoch behind our back. What other nodes put under the new one is theirs, and stays.
"""

from __future__ import annotations

import asyncio

from kvtier.errors import KVTierError
from kvtier.pools.remote.engine import RemoteOutcome
from kvtier.pools.remote.keys import epoch_folder, epoch_key, namespace_folder, seen_folder
from kvtier.server.namespaces import Namespaces
from kvtier.server.purge_records import TierReport
from kvtier.server.purge_tiers import Progress
from kvtier.server.remote_tier import RemoteKeeper

# Of one question; an engine with many values is asked again and again.
CALL_SECONDS = 5.0
# In a row that say nothing.
FAILURES_MAX = 3


class RemotePurge:
    """Lives on the event loop."""

    def __init__(self, keeper: RemoteKeeper, namespaces: Namespaces) -> None:
        self._keeper = keeper
        self._namespaces = namespaces
        self._numbers: dict[bytes, int] = {}

    async def begin(self, fingerprint: bytes) -> None:
        """Before the core forgets. Raises KVTierError when that cannot be recorded."""
        opened = self._namespaces.with_fingerprint(fingerprint)
        if opened is not None:
            self._numbers[fingerprint] = await self._keeper.begin_clear(opened.id)

    async def erase(self, fingerprint: bytes, report: TierReport, progress: Progress) -> str:
        """Why something was left, or ""."""
        opened = self._namespaces.with_fingerprint(fingerprint)
        progress.waits = "other nodes are told"
        epoch: int | None
        try:
            if opened is None:
                epoch = await self._keeper.clear_closed(fingerprint)
            else:
                await self._keeper.end_clear(opened.id, self._numbers.pop(fingerprint))
                epoch = self._keeper.epoch_of(opened.id)
        except KVTierError as error:
            return str(error)
        kept = [epoch_key(fingerprint), seen_folder(fingerprint)]
        if epoch is not None:
            kept.append(epoch_folder(fingerprint, epoch))
        progress.waits = ""
        self._keeper.parts.buffers.forget()
        failures = 0
        while failures < FAILURES_MAX:  # Each call that does not fail deletes some, or is the last.
            emptied = await self._keeper.parts.engine.delete_under(
                namespace_folder(fingerprint), kept=kept, timeout_seconds=CALL_SECONDS
            )
            if emptied.count:
                progress.add(report, count_bytes=0, places=emptied.count)
            if emptied.outcome is RemoteOutcome.DONE:
                return ""
            failures = 0 if emptied.count else failures + 1
            await asyncio.sleep(0)
        return f"{self._keeper.name} could not be emptied: {emptied.outcome}"
