"""Stages that ask whether the bytes are right: attributes, kernels, tests, compute-sanitizer."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu import attention
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.rig import Rig
from benchmarks.gpu.verified import ROOT
from kvtier.cuda.copy_submit import PieceSubmitter
from kvtier.cuda.numa import device_node
from kvtier.cuda.path_trials import give_up_wrong_paths

SMALL_STAGE = "kernels"
_SMALL_ATTENTION = attention.Sizes(requests=4, tokens=512, repeat_count=2)
_TAIL_CHARS = 3000
_SMI_FIELDS = ("name", "driver_version", "pcie.link.gen.current", "pcie.link.width.current")
_TOOL_SECONDS_MAX = 600.0
_TOOLS = ("memcheck", "racecheck")
# What compute-sanitizer says of a GPU that it cannot watch, as under some virtual kernels; CUDA
# then fails in the process that it watches, which says nothing about our kernels.
_TOOL_REFUSAL = "Device not supported"

# pyproject's own options ask for plugins that a GPU machine may lack.
_PYTEST_INI = """[pytest]
addopts = --import-mode=importlib
markers =
    gpu
    slow
    full_form
    torture
"""


def attributes(rig: Rig, findings: Findings) -> None:
    found = rig.runtime.attributes(rig.device)
    for name, value in asdict(found).items():
        findings.note(name, value)
    findings.note("free_bytes", rig.runtime.free_bytes())
    findings.note("nearest_node", device_node(found))
    findings.note("has_batches", rig.runtime.has_batches)
    for name, value in smi_fields().items():
        findings.note(name, value)
    entry_points = getattr(rig.runtime, "_entry_points", None)
    for name in ("runtime_version", "driver_version"):
        version = getattr(entry_points, name, 0)
        findings.note(f"cuda_{name}", f"{version // 1000}.{version % 1000 // 10}")
    findings.claim("host memory can be registered", found.can_register_host)


def smi_fields() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; nothing where it is absent."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return dict(zip(_SMI_FIELDS, values, strict=False))


def small_kernels(rig: Rig, findings: Findings, sizes: attention.Sizes = _SMALL_ATTENTION) -> None:
    """Every kernel once, small enough for a tool that makes it a hundred times slower."""
    kernels = rig.make_kernels()
    findings.claim("kernels are there", kernels is not None)
    wrong = give_up_wrong_paths(rig.runtime, PieceSubmitter(rig.runtime, kernels))
    findings.claim(f"every path moves the right bytes {wrong or ''}".strip(), not wrong)
    attention.measure(rig, findings, sizes)


def gpu_tests(rig: Rig, findings: Findings, root: Path = ROOT, spare_seconds: float = 2.0) -> None:
    """`pytest -m gpu` on the files that have such tests; each test opens a device of its own."""
    files = files_with_gpu_tests(root)
    findings.note("files", [str(path.relative_to(root)) for path in files])
    with tempfile.TemporaryDirectory() as folder:
        ini, out = Path(folder) / "pytest.ini", Path(folder) / "out"
        ini.write_text(_PYTEST_INI, encoding="utf-8")
        code: int | None = None
        with out.open("wb") as file, contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                [
                    *(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"),
                    *("-c", str(ini), "--rootdir", str(root), *map(str, files)),
                ],
                cwd=root,
                env={**os.environ, "KVTIER_GPU": "1", "PYTHONPATH": str(root)},
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=max(0.1, min(rig.deadline - rig.now(), _TOOL_SECONDS_MAX) - spare_seconds),
            ).returncode
        said = out.read_text(encoding="utf-8", errors="replace")
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", _last(said))}
    findings.note("passed", counts.get("passed", 0))
    if code != 0:
        findings.note("output", said[-_TAIL_CHARS:])
    if code is None:
        findings.claim("GPU tests end in the stage's time", is_right=False)
        return
    findings.claim(f"GPU tests pass ({_last(said)})", code == 0)
    findings.claim("there are GPU tests", counts.get("passed", 0) > 0)


def files_with_gpu_tests(root: Path) -> list[Path]:
    """Those that name the mark, and those whose folder has a fixture that gives it to a test."""
    mark = "pytest.mark." + "gpu"
    places = [
        path
        for name in ("test_*.py", "conftest.py")
        for path in sorted((root / "tests").rglob(name))
        if mark in path.read_text(encoding="utf-8")
    ]
    found: set[Path] = set()
    for place in places:
        found.update([place] if place.name != "conftest.py" else place.parent.rglob("test_*.py"))
    return sorted(found)


def sanitizer(
    rig: Rig, findings: Findings, tool_path: str | None = None, seconds_least: float = 20.0
) -> None:
    """Our kernels under compute-sanitizer; said, and not wrong, where it is of no use."""
    found = tool_path or shutil.which("compute-sanitizer") or _beside_nvcc()
    if found is None:
        findings.note("compute_sanitizer", "absent: not run")
        return
    for tool in _TOOLS:
        if rig.is_late(seconds_least):
            findings.cut_short(tool)
            continue
        command = [found, "--tool", tool, "--error-exitcode", "9", sys.executable]
        try:
            done = subprocess.run(
                [*command, str(ROOT / "scripts" / "gpu_check.py"), "--stage", SMALL_STAGE],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=min(rig.deadline - rig.now(), _TOOL_SECONDS_MAX),
            )
        except subprocess.TimeoutExpired:
            findings.cut_short(tool)
            continue
        if done.returncode != 0 and _TOOL_REFUSAL in done.stdout:
            findings.note(tool, f"not run: {_TOOL_REFUSAL}")
            continue
        findings.note(tool, _last(done.stdout))
        if done.returncode != 0:
            findings.note(f"{tool}_output", done.stdout[-_TAIL_CHARS:])
        findings.claim(f"{tool} finds nothing", done.returncode == 0)


def _beside_nvcc() -> str | None:
    path = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return str(path) if path.exists() else None


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else "no output"
