"""Calls of several tenants begin in turn: in each turn of the event loop one of each.

Whoever has a hundred connections has a hundred calls ready at once; all of them would be worked off
before the one call of somebody else. Here that waits for one of them.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Belongs to the event loop."""

    def __init__(self, *, is_needed: bool) -> None:
        """`is_needed`: there are several tenants; else every call passes at once."""
        self._is_needed = is_needed
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._is_turning = False

    @property
    def waiting_count(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def enter(self, tenant: str) -> None:
        """Until it is the turn of one call of this tenant."""
        if not self._is_needed:
            return
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn, loop)
        await turn  # Who is cancelled meanwhile is passed over.

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        for tenant in list(self._waiting):
            queue = self._waiting[tenant]
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    turn.set_result(None)
                    break
            if not queue:
                del self._waiting[tenant]
        self._is_turning = bool(self._waiting)
        if self._is_turning:
            loop.call_soon(self._turn, loop)
