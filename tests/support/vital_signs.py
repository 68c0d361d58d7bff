"""What a process takes up, sample after sample, and whether it is still what it was."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.daemon import RunningDaemon
from tests.support.readings import anon_bytes, median_of_histogram, wait_seconds

CALLS = "kvtier_call_seconds_count"
LAG = "kvtier_loop_lag_seconds"
FDS_PER_SESSION = 5  # Its socket, its process, its connections for calls; one that ends has fewer.
_TICKS_PER_SECOND = 100


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment; counters count since the daemon began."""

    at: float
    anon_bytes: int
    fds: int  # Without those of sessions.
    fd_kinds: Mapping[str, int]
    threads: int
    sessions: int
    cpu_seconds: float
    wait_seconds: float  # The first thread could have run and was not let.
    metrics: Mapping[str, float]


def take_sample(daemon: RunningDaemon) -> Sample:
    """The samples of /metrics that are kept are those of calls and of the loop's lag."""
    pid = daemon.process.pid
    folder = Path(f"/proc/{pid}")
    metrics = daemon.metrics()
    kept = {name: value for name, value in metrics.items() if name.startswith((CALLS, LAG))}
    kinds = fd_kinds(pid)
    sessions = sum(int(n) for name, n in metrics.items() if name.startswith("kvtier_sessions{"))
    words = (folder / "stat").read_text().rpartition(")")[2].split()
    return Sample(
        time.monotonic(),
        anon_bytes(pid),
        kinds.total() - FDS_PER_SESSION * sessions,
        kinds,
        len(list((folder / "task").iterdir())),
        sessions,
        (int(words[11]) + int(words[12])) / _TICKS_PER_SECOND,
        wait_seconds(pid),
        kept,
    )


def fd_kinds(pid: int) -> Counter[str]:
    """Descriptors by what they lead to, numbers left out: socket, /memfd:kvtier-slab, a path."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # Closed since it was listed.
            kinds[os.readlink(link).split(":[")[0].removesuffix(" (deleted)")] += 1
    return kinds


@dataclass(frozen=True, slots=True)
class Window:
    """What was so between two samples: medians of what is taken up, rates of the rest."""

    anon_bytes: float
    fds: float
    threads: float
    sessions: float
    lag_seconds: float  # The median.
    machine_share: float  # Of the time that the loop was not let run by others on the machine.
    cpu_seconds_per_call: float
    calls_per_second: float

    def __str__(self) -> str:
        return (
            f"{self.anon_bytes / (1 << 20):.2f} MiB private, {self.fds:.0f} fds, "
            f"{self.threads:.0f} threads, {self.sessions:.0f} sessions, "
            f"lag {1000 * self.lag_seconds:.2f} ms (kept from running "
            f"{100 * self.machine_share:.1f} %), {self.calls_per_second:.0f} calls/s, "
            f"{1e6 * self.cpu_seconds_per_call:.0f} us of CPU each"
        )


def window_of(samples: Sequence[Sample]) -> Window:
    """Of at least two samples."""
    first, last = samples[0], samples[-1]
    seconds = last.at - first.at
    calls = _calls(last) - _calls(first)
    return Window(
        statistics.median(one.anon_bytes for one in samples),
        statistics.median(one.fds for one in samples),
        statistics.median(one.threads for one in samples),
        statistics.median(one.sessions for one in samples),
        median_of_histogram(first.metrics, last.metrics, LAG),
        (last.wait_seconds - first.wait_seconds) / seconds,
        (last.cpu_seconds - first.cpu_seconds) / max(1.0, calls),
        calls / seconds,
    )


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much more the last window may show than the first: a share, and what is noise.
    `time_share` is math.inf where the windows are too short for times to say anything."""

    share: float
    anon_bytes: float
    count: float
    time_share: float
    lag_seconds: float


def growth_of(first: Window, last: Window, bounds: Bounds) -> list[str]:
    """What has grown beyond its bound. The lag may grow with the load that others make."""
    others = max(1.0, last.machine_share / max(first.machine_share, 0.01))
    ends = {
        "anon_bytes": first.anon_bytes * (1 + bounds.share) + bounds.anon_bytes,
        "fds": first.fds * (1 + bounds.share) + bounds.count,
        "threads": first.threads * (1 + bounds.share) + bounds.count,
        "lag_seconds": first.lag_seconds * (1 + bounds.time_share) * others + bounds.lag_seconds,
        "cpu_seconds_per_call": first.cpu_seconds_per_call * (1 + bounds.time_share),
    }
    return [
        f"{name}: {getattr(first, name):.6g}, then {getattr(last, name):.6g}"
        for name, end in ends.items()
        if getattr(last, name) > end
    ]


def _calls(sample: Sample) -> float:
    return sum(value for name, value in sample.metrics.items() if name.startswith(CALLS))
