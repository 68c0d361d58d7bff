"""What a benchmark was run on, for the JSON beside its numbers."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import kvtier
from kvtier.version import VERSION

_PACKAGES = ("grpcio", "protobuf", "uvloop", "numpy", "xxhash")


def describe(page_kind: str = "") -> dict[str, object]:
    """JSON values only. `page_kind`: what pages the daemon's slabs lie on, where it matters."""
    found: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "kvtier": VERSION,
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        # Above the number of cores, others had a share of them: read ratios, not times.
        "load_average": round(os.getloadavg()[0], 2),
    }
    found.update({package: _version(package) for package in _PACKAGES})
    if page_kind:
        found["page_kind"] = page_kind
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the checkout that runs, "+" when files of it were changed; None for a wheel."""
    root = Path(kvtier.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "kvtier", "proto")
    return commit + ("+" if changed else "") if commit else None


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
