"""What other processes took of this machine while something was measured."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path


class Neighbours:
    """Cores that others had, on average, since this was made."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._busy_seconds = _busy_seconds()

    def cores(self) -> float:
        """NaN where the kernel tells nothing."""
        seconds = time.monotonic() - self._began_at
        return max(0.0, (_busy_seconds() - self._busy_seconds) / seconds)


def _busy_seconds() -> float:
    """Processor time of all others, of the hypervisor's other guests too; not of our own, and of
    children that we have waited for."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return float("nan")
    ticks = [int(word) for word in line.split()[1:9]]  # Guests are counted in user.
    idle = ticks[3] + ticks[4]
    busy = (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        busy -= used.ru_utime + used.ru_stime
    return busy
