"""How late the event loop is: what every call waits for before the daemon looks at it."""

from __future__ import annotations

import asyncio

from kvtier.clock import Clock
from kvtier.metrics import Metrics

# Often enough for a median over some seconds; ten turns of an idle loop take 0.03 % of a core.
SAMPLE_SECONDS = 0.1


async def watch_lag(clock: Clock, metrics: Metrics) -> None:
    """Until cancelled."""
    while True:
        due = clock.now() + SAMPLE_SECONDS
        await asyncio.sleep(SAMPLE_SECONDS)
        metrics.calls.loop_lag_seconds.observe(max(0.0, clock.now() - due))
