"""Work that cannot be cancelled is finished."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end even if we are cancelled; then pass the cancellation on.

    A thread cannot be cancelled. Were we to return early, the caller would free its slots and a
    stale write would land in the next owner's block.
    """
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])  # Being cancelled here leaves `task` running.
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # Seen: the caller is gone.
        raise cancelled
    return task.result()
