"""When `make gpu-check` leaves a stamp, with stages that only say what they found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.runner import Stage
from benchmarks.gpu.verified import STAMP, read_stamp, state_line
from scripts import gpu_check

pytestmark = pytest.mark.slow

ABOUT = {
    "name": "NVIDIA H200",
    "driver_version": "580.1",
    "cuda_runtime_version": "13.0",
    "pci_bus": "0000:00:00.0",
}
SOURCE = Path("kernels") / "kv_copy.cu"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in (SOURCE, Path("kvtier") / "cuda" / "cudart.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("source", encoding="utf-8")
    return tmp_path


def run(root: Path, *, may_stamp: bool = True, change: str = "", **found: list[str]) -> int:
    """Attributes, and one stage that found this, and may have changed a source."""

    def command(stage: Stage, findings: Path, seconds: float) -> list[str]:
        figures = ABOUT if stage.name == "attributes" else {"best": 1.5}
        text = json.dumps({"figures": figures, **(found if stage.name == "copies" else {})})
        program = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
        if change:
            program += f"; pathlib.Path({change!r}).write_text('changed')"
        return [sys.executable, "-c", program, str(findings), text]

    stages = [Stage("attributes", 20), Stage("copies", 20)]
    return gpu_check.check(stages, root / "out", may_stamp=may_stamp, root=root, command=command)


def test_a_run_without_a_fault_leaves_a_stamp_of_what_it_ran_with(root: Path) -> None:
    assert run(root) == 0
    assert state_line(root).startswith("GPU path: VERIFIED on NVIDIA H200, ")
    stamp = read_stamp(root)
    assert stamp is not None
    assert (stamp.driver, stamp.cuda) == ("580.1", "13.0")
    assert stamp.figures["copies"] == {"best": 1.5}
    assert (root / "out" / STAMP.name).read_bytes() == (root / STAMP).read_bytes()


def test_a_missed_target_is_in_the_stamp_and_in_the_exit_code(root: Path) -> None:
    assert run(root, missed=["onboard: 0.5"]) == 1
    assert state_line(root).endswith("1 targets of speed missed")


def test_a_wrong_byte_leaves_no_stamp(root: Path) -> None:
    assert run(root, wrong=["bytes differ"]) == 1
    assert state_line(root) == "GPU path: STALE: never run on a GPU"


def test_a_failed_run_leaves_an_older_stamp_as_it_is(root: Path) -> None:
    run(root)
    before = (root / STAMP).read_bytes()
    assert run(root, wrong=["bytes differ"]) == 1
    assert (root / STAMP).read_bytes() == before


def test_a_source_that_changed_meanwhile_was_not_what_ran(root: Path) -> None:
    assert run(root, change=str(root / SOURCE)) == 0
    assert read_stamp(root) is None


def test_some_stages_only_are_no_verification(root: Path) -> None:
    assert run(root, may_stamp=False) == 0
    assert read_stamp(root) is None
