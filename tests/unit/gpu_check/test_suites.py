"""The stages that start other programs: tests on a GPU, a sanitizer, a process that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import kill_copy, suites
from benchmarks.gpu.findings import Findings
from kvtier.cuda.copy_paths import CopyPath
from kvtier.cuda.fake import FakeCudart
from tests.support.twin_kernels import TwinKernels
from tests.tidy.sources import ROOT
from tests.unit.gpu_check.small_rig import rig_of
from tests.unit.gpu_check.test_compute_stages import ATTENTION, AttentionTwin

pytestmark = pytest.mark.slow

MARK = "pytest.mark." + "gpu"


def test_attributes_name_the_device() -> None:
    findings = Findings()
    suites.attributes(rig_of(FakeCudart()), findings)
    assert findings.figures["compute_capability"] == (9, 0)
    assert findings.figures["has_batches"] is True
    assert not findings.wrong


def test_all_kernels_run_once_small() -> None:
    cuda, findings = FakeCudart(), Findings()
    AttentionTwin(cuda)
    suites.small_kernels(rig_of(cuda), findings, ATTENTION)
    assert not findings.wrong
    cuda.assert_clean()


def test_a_wrong_kernel_fails_the_small_stage() -> None:
    cuda, findings = FakeCudart(), Findings()
    AttentionTwin(cuda)
    rig, kernels = rig_of(cuda), TwinKernels(cuda)
    kernels.corrupt.add(CopyPath.KERNEL)
    rig.make_kernels = lambda: kernels
    suites.small_kernels(rig, findings, ATTENTION)
    assert findings.wrong == ["every path moves the right bytes ['kernel HOST_TO_DEVICE']"]


def make_tests(root: Path, body: str) -> Path:
    folder = root / "tests" / "some"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(
        f"import os, pytest\npytestmark = {MARK}\n"
        f"def test_it():\n    assert os.environ['KVTIER_GPU'] == '1'\n    {body}\n",
        encoding="utf-8",
    )
    (folder / "test_other.py").write_text("raise RuntimeError('no GPU test')\n", encoding="utf-8")
    return root


def test_gpu_tests_are_found_by_their_mark_and_run(tmp_path: Path) -> None:
    findings = Findings()
    suites.gpu_tests(rig_of(FakeCudart()), findings, make_tests(tmp_path, "pass"))
    assert findings.figures["files"] == ["tests/some/test_it.py"]
    assert findings.figures["passed"] == 1
    assert not findings.wrong


def test_a_gpu_test_that_fails_fails_the_stage_with_its_output(tmp_path: Path) -> None:
    findings = Findings()
    suites.gpu_tests(rig_of(FakeCudart()), findings, make_tests(tmp_path, "assert 1 == 2"))
    assert findings.wrong[0].startswith("GPU tests pass (1 failed")
    assert "assert 1 == 2" in findings.figures["output"]


@pytest.mark.slow
def test_gpu_tests_without_an_end_fail_the_stage_with_what_they_said(tmp_path: Path) -> None:
    findings, root = Findings(), make_tests(tmp_path, "__import__('time').sleep(60)")
    suites.gpu_tests(rig_of(FakeCudart(), seconds=3.0), findings, root)
    assert findings.wrong == ["GPU tests end in the stage's time"]
    assert "output" in findings.figures


def test_the_contract_suite_is_among_the_gpu_tests() -> None:
    files = [str(path.relative_to(ROOT)) for path in suites.files_with_gpu_tests(ROOT)]
    assert "tests/contract/test_real_cuda.py" in files


def test_tests_that_a_fixture_sends_to_the_gpu_are_among_them() -> None:
    """The kernels' own: their `kernels` is the twin or a GPU, by a mark in their conftest."""
    files = [str(path.relative_to(ROOT)) for path in suites.files_with_gpu_tests(ROOT)]
    assert "tests/kernels/test_paged_attention.py" in files
    assert "tests/kernels/test_copy_runs.py" in files


@pytest.mark.parametrize(("code", "wrong"), [(0, []), (9, ["memcheck finds nothing"])])
def test_what_the_sanitizer_says_counts(tmp_path: Path, code: int, wrong: list[str]) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$2 done"\n[ "$2" = racecheck ] || exit {code}\n')
    tool.chmod(0o755)
    findings = Findings()
    suites.sanitizer(rig_of(FakeCudart()), findings, str(tool))
    assert findings.figures["memcheck"] == "memcheck done"
    assert findings.figures["racecheck"] == "racecheck done"
    assert findings.wrong == wrong


def test_a_sanitizer_that_cannot_watch_this_gpu_says_nothing_about_our_kernels(
    tmp_path: Path,
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        '#!/bin/sh\necho "========= Error: Device not supported."\necho "CUDA error 999"\nexit 9\n'
    )
    tool.chmod(0o755)
    findings = Findings()
    suites.sanitizer(rig_of(FakeCudart()), findings, str(tool))
    assert findings.figures["memcheck"] == "not run: Device not supported"
    assert not findings.wrong


def test_a_sanitizer_without_end_is_cut_short_and_not_wrong(tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    findings = Findings()
    suites.sanitizer(rig_of(FakeCudart(), seconds=0.3), findings, str(tool), seconds_least=0.1)
    assert findings.figures["not_measured"] == ["memcheck", "racecheck"]
    assert not findings.wrong


def test_without_the_sanitizer_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    findings = Findings()
    suites.sanitizer(rig_of(FakeCudart()), findings)
    assert findings.figures["compute_sanitizer"] == "absent: not run"
    assert not findings.wrong


KILL = kill_copy.Sizes(half_bytes=2 << 20, quiet_seconds=0.1)


def test_a_process_killed_in_mid_copy_leaves_memory_that_is_quiet_and_usable() -> None:
    cuda, findings = FakeCudart(), Findings()
    kill_copy.measure(rig_of(cuda), findings, KILL)
    assert not findings.wrong
    assert findings.figures["seconds_from_gone_to_last_byte"] is None
    cuda.assert_clean()
