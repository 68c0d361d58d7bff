"""The GPU path on a real GPU: `make gpu-check`, ten minutes at most, no network.

Needs Python 3.12 with NumPy, torch, cupy and pytest, and the sources; nothing is installed.
Exits with 0 when everything holds, 1 when a stage failed or missed a target, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import (  # noqa: E402
    attention,
    copy_sweep,
    end_to_end,
    engine,
    interference,
    kill_copy,
    registration_costs,
    suites,
)
from benchmarks.gpu.findings import Findings  # noqa: E402
from benchmarks.gpu.rig import open_rig  # noqa: E402
from benchmarks.gpu.runner import Report, Stage, run_stages  # noqa: E402
from benchmarks.gpu.verified import (  # noqa: E402
    STAMP,
    Stamp,
    source_hashes,
    state_line,
    write_stamp,
)
from kvtier.errors import KVTierError  # noqa: E402

TOTAL_SECONDS = 585.0
OUT = ROOT / ".kvtier" / "gpu-check"

# In this order: what is wrong is known before what is slow. The seconds are limits, not forecasts.
STAGES = {
    Stage("attributes", 20): suites.attributes,
    Stage(suites.SMALL_STAGE, 30): suites.small_kernels,
    Stage("tests", 110): suites.gpu_tests,
    Stage("sanitizer", 80): suites.sanitizer,
    Stage("registration", 60): registration_costs.measure,
    Stage("copies", 100): copy_sweep.measure,
    Stage("attention", 40): attention.measure,
    Stage("interference", 90): interference.measure,
    Stage("end-to-end", 50): end_to_end.measure,
    Stage("engine", 60): engine.measure,
    Stage("kill", 45): kill_copy.measure,
}


def main() -> int:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the report")
    parser.add_argument("--only", nargs="+", choices=names, help="these stages; writes no stamp")
    parser.add_argument("--stage", choices=names, help="one stage in this process")
    parser.add_argument("--seconds", type=float, default=600.0, help="for --stage")
    parser.add_argument("--findings", type=Path, help="for --stage: where to write what it finds")
    options = parser.parse_args()
    if options.stage:
        return run_stage(options.stage, options.seconds, options.findings, options.out)
    missing = why_no_gpu()
    if missing is not None:
        print(f"make gpu-check: no usable GPU here: {missing}", file=sys.stderr)
        return 2
    stages = [stage for stage in STAGES if not options.only or stage.name in options.only]
    return check(stages, options.out.resolve(), may_stamp=not options.only)


def why_no_gpu() -> str | None:
    """Asks for the number of devices, which opens none."""
    from kvtier.cuda.cudart import open_cudart

    try:
        count = open_cudart().device_count()
    except KVTierError as error:
        return str(error)
    return None if count else "CUDA counts 0 devices"


def command_of(stage: Stage, findings: Path, seconds: float) -> list[str]:
    words = ["--stage", stage.name, "--findings", str(findings), "--out", str(findings.parent)]
    return [sys.executable, str(Path(__file__)), *words, "--seconds", f"{seconds:.0f}"]


def check(
    stages: list[Stage],
    out: Path,
    *,
    may_stamp: bool,
    root: Path = ROOT,
    command: Callable[[Stage, Path, float], list[str]] = command_of,
) -> int:
    """The exit code. A stamp is written only for sources in which nothing was found wrong."""
    sources = source_hashes(root)
    header = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "sources": sources,
        "python": sys.version.split()[0],
    }
    report = Report(out / "report.json", header)
    run_stages(stages, report, command, total_seconds=TOTAL_SECONDS)
    for name, found in report.stages.items():
        print(f"{found['outcome']:16} {name}  {'; '.join(reasons(found))}")
    print(f"report: {report.place}")
    if may_stamp and not report.failed and source_hashes(root) == sources:
        write_stamp(stamp_of(report), root)
        # The machine may be another one than that of the checkout.
        shutil.copy(root / STAMP, out / STAMP.name)
    elif may_stamp:
        print("no stamp: a stage failed, or a source changed meanwhile")
    print(state_line(root))
    return 1 if report.failed or report.missed else 0


def reasons(found: dict[str, Any]) -> list[str]:
    error = [str(found["error"]).splitlines()[-1]] if found.get("error") else []
    late = [f"no time for {what}" for what in found.get("figures", {}).get("not_measured", [])]
    return [*error, *found.get("wrong", []), *found.get("missed", []), *late]


def stamp_of(report: Report) -> Stamp:
    about = report.stages["attributes"]["figures"]
    return Stamp(
        device=str(about.get("name", f"GPU {about['pci_bus']}")),
        driver=str(about.get("driver_version", "unknown")),
        cuda=str(about["cuda_runtime_version"]),
        date=report.header["date"],
        commit=report.header["commit"],
        sources=report.header["sources"],
        figures={name: found.get("figures", {}) for name, found in report.stages.items()},
        missed=tuple(report.missed),
    )


def commit() -> str:
    """With a + when files differ from it; `unknown` outside of a git checkout."""
    try:
        words = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def run_stage(name: str, seconds: float, place: Path | None, out: Path) -> int:
    """In this process, which the caller may kill."""
    [measure] = [measure for stage, measure in STAGES.items() if stage.name == name]
    findings = Findings(place)
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        measure(open_rig(seconds, out / "cubins"), findings)
    except Exception as error:  # noqa: BLE001 - The report must say what ended the stage.
        traceback.print_exc()
        findings.error = f"{type(error).__name__}: {error}"
    findings.save()
    return 1 if findings.error or findings.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
