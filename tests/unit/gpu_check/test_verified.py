"""The stamp of the GPU check speaks of the sources that it saw, and of no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.verified import (
    ROOT,
    STAMP,
    Stamp,
    source_hashes,
    state_line,
    write_json,
    write_stamp,
)

FILES = {
    "kernels/kv_copy.cu": "kernel",
    "kernels/kv_core.cuh": "core",
    "kernels/README.md": "words",
    "kernels/host_twin.cpp": "twin",
    "kvtier/cuda/cudart.py": "binding",
    "kvtier/cuda/fake_memory.py": "fake",
    "kvtier/cuda/race_checker.py": "checker",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def stamp_of(root: Path) -> Stamp:
    return Stamp(
        device="NVIDIA H200",
        driver="580.1",
        cuda="13.0",
        date="2026-11-30",
        commit="abc",
        sources=source_hashes(root),
        figures={"copies": {"best_gigabytes_per_second": 1.0}},
    )


def test_without_a_stamp_the_path_never_ran(root: Path) -> None:
    assert state_line(root) == "GPU path: STALE: never run on a GPU"


def test_a_stamp_of_these_sources_verifies_them(root: Path) -> None:
    write_stamp(stamp_of(root), root)
    assert state_line(root) == "GPU path: VERIFIED on NVIDIA H200, 2026-11-30"


@pytest.mark.parametrize(
    "name", ["kernels/kv_copy.cu", "kernels/kv_core.cuh", "kvtier/cuda/cudart.py"]
)
def test_a_changed_source_makes_it_stale_and_is_named(root: Path, name: str) -> None:
    write_stamp(stamp_of(root), root)
    (root / name).write_text("other", encoding="utf-8")
    assert state_line(root).startswith("GPU path: STALE: since 2026-11-30 (NVIDIA H200)")
    assert name in state_line(root)


def test_a_new_source_and_one_that_went_make_it_stale(root: Path) -> None:
    write_stamp(stamp_of(root), root)
    (root / "kernels/kv_copy.cu").rename(root / "kernels/renamed.cu")
    assert "kernels/kv_copy.cu, kernels/renamed.cu" in state_line(root)


@pytest.mark.parametrize(
    "name",
    [
        "kernels/README.md",
        "kernels/host_twin.cpp",
        "kvtier/cuda/fake_memory.py",
        "kvtier/cuda/race_checker.py",
    ],
)
def test_what_never_meets_a_gpu_may_change(root: Path, name: str) -> None:
    write_stamp(stamp_of(root), root)
    (root / name).write_text("other", encoding="utf-8")
    assert "VERIFIED" in state_line(root)


def test_missed_targets_are_said_in_the_same_line(root: Path) -> None:
    write_stamp(replace(stamp_of(root), missed=("too slow",)), root)
    assert state_line(root).endswith("2026-11-30, 1 targets of speed missed")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"device": "x", "missed": []}'])
def test_what_is_no_stamp_verifies_nothing(root: Path, text: str) -> None:
    (root / STAMP).write_text(text, encoding="utf-8")
    assert state_line(root).startswith("GPU path: STALE: ")


def test_a_file_is_replaced_whole_or_left_as_it_was(tmp_path: Path) -> None:
    place = tmp_path / "report.json"
    write_json(place, {"a": 1})
    with pytest.raises(TypeError):
        write_json(place, {"a": object()})
    assert place.read_text(encoding="utf-8") == '{\n  "a": 1\n}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_the_sources_of_this_repository_are_hashed() -> None:
    paths = source_hashes()
    assert {"kernels/kv_copy.cu", "kvtier/cuda/cudart.py", "kvtier/cuda/streams.py"} <= {*paths}
    assert not [path for path in paths if "fake" in path]


def test_the_document_says_what_the_stamp_says() -> None:
    """Its words about what has run where change with the stamp."""
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    is_stale = state_line().startswith("GPU path: STALE")
    assert ("**State: STALE." in text) == is_stale
