"""What the kernel and the daemon's histograms say of a running daemon."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def anon_bytes(pid: int) -> int:
    """Private memory of a process; a daemon's slabs and its slot table are shared memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [one for one in status.splitlines() if one.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


def disk_bytes(pid: int, name: str) -> int:
    """What the kernel has counted for a process: `read_bytes` or `write_bytes`."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)[name])


def median_of_histogram(
    before: Mapping[str, float], after: Mapping[str, float], name: str, label: str = ""
) -> float:
    """The median of what was observed between two readings of /metrics, straight inside its
    bucket; `label` as in `method="Match"`."""
    counts: dict[float, float] = {}
    for sample, value in after.items():
        if sample.startswith(f"{name}_bucket{{") and label in sample:
            bound = float(sample.partition('le="')[2].partition('"')[0])
            counts[bound] = value - before.get(sample, 0.0)
    half = counts[float("inf")] / 2
    assert half > 0, f"nothing was observed of {name}"
    low = below = 0.0
    for bound, count in sorted(counts.items()):
        if count >= half:
            share = (half - below) / (count - below)
            return low + share * (bound - low) if bound < float("inf") else bound
        low, below = bound, count
    raise AssertionError("the last bucket holds all")


def wait_seconds(pid: int) -> float:
    """For how long the process's first thread could have run and was not let, since it began: what
    the machine does to a daemon's event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
