"""What /proc says of a process: its memory and its processor time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes by kind. Pool pages and the slot table are memfds: `shared_bytes`."""

    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int

    @property
    def own_bytes(self) -> int:
        """All but the pool's pages."""
        return self.anonymous_bytes + self.file_bytes


def memory_of(pid: int) -> Memory:
    return parse_status(Path(f"/proc/{pid}/status").read_text())


def parse_status(text: str) -> Memory:
    """The three Rss fields of /proc/PID/status."""
    sizes = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.startswith("Rss"):
            sizes[name] = int(value.split()[0]) << 10
    return Memory(sizes["RssAnon"], sizes["RssFile"], sizes["RssShmem"])


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads so far, to the nanosecond where the kernel keeps it.

    The time of threads that have ended is missing; over an idle span that is none.
    """
    total_ns = 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text()
            total_ns += int(text.split()[0])
    except OSError:
        return _cpu_seconds_in_ticks(pid)
    return total_ns / 1e9


def _cpu_seconds_in_ticks(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
