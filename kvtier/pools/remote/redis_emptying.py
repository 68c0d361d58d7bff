"""Deleting what a scan of a Redis server finds, a page at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from kvtier.pools.remote.engine import TROUBLES, RemoteKey, RemoteOutcome

# In one step, about: none of them keeps the server from others' calls.
SCANNED_KEYS = 512
_PAGE_KEYS = 256


class Emptying:
    """Of what a scan finds; `count` values are gone because of it, wherever it ends."""

    def __init__(
        self,
        found: AsyncIterator[bytes],
        spared: tuple[str, ...],
        delete: Callable[[Sequence[RemoteKey]], Awaitable[Sequence[RemoteOutcome]]],
    ) -> None:
        """`spared`: how keys begin that stay."""
        self._found, self._spared, self._delete = found, spared, delete
        self.count = 0

    async def run(self) -> RemoteOutcome:
        """DONE when all were seen and none is left but those that are spared."""
        keys: list[RemoteKey] = []
        async for name in self._found:
            key = RemoteKey(name.decode("ascii", "replace"))
            if not key.startswith(self._spared):
                keys.append(key)
            if len(keys) == _PAGE_KEYS:
                outcome = await self._delete_page(keys)
                if outcome is not RemoteOutcome.DONE:
                    return outcome
                keys = []
        return await self._delete_page(keys)

    async def _delete_page(self, keys: Sequence[RemoteKey]) -> RemoteOutcome:
        outcomes = await self._delete(keys)
        self.count += list(outcomes).count(RemoteOutcome.DONE)
        return next((one for one in outcomes if one in TROUBLES), RemoteOutcome.DONE)
