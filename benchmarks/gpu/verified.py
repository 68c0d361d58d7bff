"""What `make gpu-check` leaves behind, and whether it still speaks of the sources that are here.

`kernels/VERIFIED.json` is written by a run on a GPU in which nothing failed. It names each source
that runs on a GPU or talks to one, by hash: once one of them changes, its figures are of the past.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STAMP = Path("kernels") / "VERIFIED.json"

_PATTERNS = ("kernels/*.cu", "kernels/*.cuh", "kvtier/cuda/*.py")
# What stands in for a GPU in tests says nothing about one.
_STAND_INS = ("fake", "race_checker")
_NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class Stamp:
    """One run of the GPU check, as it is kept."""

    device: str
    driver: str
    cuda: str
    date: str  # 2026-11-30.
    commit: str
    sources: Mapping[str, str]  # Hash by path.
    figures: Mapping[str, Any]
    missed: tuple[str, ...] = ()  # Targets of speed that were not reached: right bytes, too slow.


def source_hashes(root: Path = ROOT) -> dict[str, str]:
    """Of every source that matters, by its path in the repository."""
    found = sorted({path for pattern in _PATTERNS for path in root.glob(pattern)})
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
        if not path.name.startswith(_STAND_INS)
    }


def read_stamp(root: Path = ROOT) -> Stamp | None:
    """None where there is none. Raises ValueError for one that cannot be understood."""
    try:
        found = json.loads((root / STAMP).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    try:
        return Stamp(**{**found, "missed": tuple(found["missed"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"{STAMP} is not a stamp: {error}") from error


def write_stamp(stamp: Stamp, root: Path = ROOT) -> None:
    write_json(root / STAMP, asdict(stamp))


def stale_reason(stamp: Stamp | None, sources: Mapping[str, str]) -> str | None:
    """Why the stamp says nothing about these sources; None when it does."""
    if stamp is None:
        return "never run on a GPU"
    changed = sorted(
        path for path in {*stamp.sources, *sources} if stamp.sources.get(path) != sources.get(path)
    )
    if not changed:
        return None
    named = ", ".join(changed[:_NAMED_MAX])
    more = f" and {len(changed) - _NAMED_MAX} more" if len(changed) > _NAMED_MAX else ""
    return f"since {stamp.date} ({stamp.device}) other sources: {named}{more}"


def state_line(root: Path = ROOT) -> str:
    """The one line of `make check`."""
    try:
        stamp = read_stamp(root)
    except ValueError as error:
        return f"GPU path: STALE: {error}"
    reason = stale_reason(stamp, source_hashes(root))
    if stamp is None or reason is not None:
        return f"GPU path: STALE: {reason}"
    missed = f", {len(stamp.missed)} targets of speed missed" if stamp.missed else ""
    return f"GPU path: VERIFIED on {stamp.device}, {stamp.date}{missed}"


def write_json(path: Path, value: object) -> None:
    """Whole or not at all, whenever the writer is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=2, sort_keys=True) + "\n"
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary = Path(file.name)
    temporary.chmod(0o644)
    temporary.replace(path)


if __name__ == "__main__":
    sys.stdout.write(state_line() + "\n")
