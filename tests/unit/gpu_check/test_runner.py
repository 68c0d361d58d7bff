"""The GPU check goes on after what fails, ends in time, and leaves a report whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.runner import FAILED, MISSED, PASSED, Report, Stage, run_stages
from tests.tidy.sources import ROOT

pytestmark = pytest.mark.slow

# What a stage does, by its name.
PROGRAMS = {
    "good": "save(wrong=[], missed=[])",
    "slow": "save(wrong=[], missed=['too slow: 1'])",
    "wrong": "save(wrong=['bytes differ'], missed=[])",
    "killed": "save(wrong=[], missed=[]); os.kill(os.getpid(), 9)",
    "silent": "pass",
    "hangs": "save(child=subprocess.Popen(['sleep', '600']).pid); time.sleep(600)",
}
HEAD = """
import json, os, subprocess, sys, time
def save(**found):
    open(sys.argv[1], "w").write(json.dumps({"figures": {"a": 1}, **found}))
"""


def run(tmp_path: Path, *names: str, total_seconds: float = 60.0, budget: float = 20.0) -> Report:
    report = Report(tmp_path / "report.json", {"commit": "abc"})

    def command_of(stage: Stage, findings: Path, seconds: float) -> list[str]:
        return [sys.executable, "-c", HEAD + PROGRAMS[stage.name], str(findings)]

    stages = [Stage(name, budget) for name in names]
    run_stages(stages, report, command_of, total_seconds=total_seconds, grace_seconds=0.0)
    assert json.loads(report.place.read_text(encoding="utf-8"))["stages"] == report.stages
    return report


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # Dead, and nobody has asked for its code.


def outcomes(report: Report) -> dict[str, str]:
    return {name: found["outcome"] for name, found in report.stages.items()}


def test_every_stage_runs_whatever_became_of_the_one_before(tmp_path: Path) -> None:
    report = run(tmp_path, "wrong", "killed", "silent", "slow", "good")
    assert outcomes(report) == {
        "wrong": FAILED,
        "killed": FAILED,
        "silent": FAILED,
        "slow": MISSED,
        "good": PASSED,
    }
    assert report.failed == ["wrong", "killed", "silent"]
    assert report.missed == ["too slow: 1"]
    assert report.stages["killed"]["error"] == "ended with -9"
    assert report.stages["killed"]["figures"] == {"a": 1}, "what it had is kept"


def test_a_stage_that_hangs_is_killed_with_all_it_started(tmp_path: Path) -> None:
    report = run(tmp_path, "hangs", "good", budget=1.0)
    assert outcomes(report) == {"hangs": FAILED, "good": PASSED}
    assert report.stages["hangs"]["error"] == "killed after 1 s"
    assert report.stages["hangs"]["figures"] == {"a": 1}
    assert not is_running(report.stages["hangs"]["child"])


def test_a_stage_without_time_left_counts_as_failed(tmp_path: Path) -> None:
    report = run(tmp_path, "good", total_seconds=1.0)
    assert report.stages["good"] == {"outcome": FAILED, "error": "no time was left"}


def test_without_a_gpu_it_says_so_in_one_line_and_exits_with_2() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_check.py")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("make gpu-check: no usable GPU here: ")
    assert done.stderr.count("\n") == 1
    assert not done.stdout


def test_the_script_needs_numpy_and_the_sources_until_a_stage_needs_more() -> None:
    """A plain checkout on a GPU machine: nothing is installed there."""
    program = """
import sys
sys.path.insert(0, "scripts")
import gpu_check
from pathlib import Path
paths = [Path(getattr(module, "__file__", None) or ".") for module in [*sys.modules.values()]]
parts = [path.parts for path in paths if "site-packages" in path.parts]
print(*sorted({found[found.index("site-packages") + 1] for found in parts}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    foreign = {name for name in done.stdout.split() if not name.startswith(("_", "__editable__"))}
    assert foreign - {"numpy", "numpy.libs", "distutils-precedence.pth"} == set()
