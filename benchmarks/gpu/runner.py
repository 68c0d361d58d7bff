"""Runs the stages of the GPU check, each in a process of its own, and keeps the report.

A fault of a device ends everything in its process, and a kernel that hangs cannot be called off:
so a stage that breaks or overstays is killed, and the next one begins on a fresh context. The
report is on disk after every stage.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.verified import write_json

# For a stage to end by itself after it has seen that its time is up.
GRACE_SECONDS = 8.0
_SECONDS_LEAST = 5.0

PASSED, MISSED, FAILED = "passed", "missed a target", "FAILED"


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    budget_seconds: float


@dataclass(slots=True, eq=False)
class Report:
    """What a run found; `header` is about the machine and the sources."""

    place: Path
    header: dict[str, Any]
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    def write(self, *, is_over: bool) -> None:
        write_json(self.place, {**self.header, "is_over": is_over, "stages": self.stages})

    @property
    def failed(self) -> list[str]:
        return [name for name, found in self.stages.items() if found["outcome"] == FAILED]

    @property
    def missed(self) -> list[str]:
        return [text for found in self.stages.values() for text in found.get("missed", [])]

    @property
    def is_cut_short(self) -> bool:
        return any(found.get("is_cut_short") for found in self.stages.values())


def run_stages(
    stages: Sequence[Stage],
    report: Report,
    command_of: Callable[[Stage, Path, float], list[str]],
    *,
    total_seconds: float,
    grace_seconds: float = GRACE_SECONDS,
) -> None:
    """All of them, whatever happens to one; those that no time is left for count as failed."""
    start = time.monotonic()
    report.write(is_over=False)
    try:
        for stage in stages:
            left = total_seconds - (time.monotonic() - start)
            if left < _SECONDS_LEAST:
                report.stages[stage.name] = {"outcome": FAILED, "error": "no time was left"}
                continue
            seconds = min(stage.budget_seconds, left)
            _say(f"== {stage.name} (at most {seconds:.0f} s)")
            findings = report.place.parent / f"stage-{stage.name}.json"
            findings.unlink(missing_ok=True)
            found = _run(command_of(stage, findings, seconds), findings, seconds + grace_seconds)
            report.stages[stage.name] = {**found, "budget_seconds": round(seconds, 1)}
            _say(f"== {stage.name}: {found['outcome']} after {found['seconds']} s")
            report.write(is_over=False)
    finally:
        report.write(is_over=True)


def _run(command: list[str], findings: Path, seconds: float) -> dict[str, Any]:
    start = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    error = None
    try:
        code = process.wait(timeout=seconds)
        if code != 0:
            error = f"ended with {code}"
    except subprocess.TimeoutExpired:
        error = f"killed after {seconds:.0f} s"
    finally:
        _kill_group(process)
    found: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1)}
    try:
        found |= json.loads(findings.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        error = error or "left no findings"
    if error is not None:
        found["error"] = found.get("error") or error
    found["outcome"] = _outcome(found)
    return found


def _outcome(found: dict[str, Any]) -> str:
    if found.get("error") or found.get("wrong"):
        return FAILED
    return MISSED if found.get("missed") else PASSED


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """The stage and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
