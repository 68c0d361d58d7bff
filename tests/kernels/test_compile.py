"""The kernels compile for every GPU that we mean, without warnings or spills, and move 16 bytes.

No GPU is needed, and none is used: these tests say nothing about what a GPU computes.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.kernel_compiler import (
    ARCHITECTURES,
    SOURCES,
    KernelReport,
    compile_kernels,
    find_tool,
    reports,
    supported_architectures,
)
from tests.support.kernel_twin import KERNELS

pytestmark = pytest.mark.slow

COPY_KERNELS = ("copy_runs", "gather_blocks", "scatter_blocks", "copy_blocks", "write_kv")
# A copy kernel's block may have 1024 threads, which share 65,536 registers. Three thread blocks of
# attention fit a multiprocessor: 12 warps, each with 4 KiB under way.
COPY_REGISTERS_MAX, ATTENTION_REGISTERS_MAX = 64, 168


@cache
def compiled(source: str, architecture: str) -> dict[str, KernelReport]:
    nvcc = find_tool("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc to compile the kernels with")
    if architecture not in supported_architectures(nvcc):
        pytest.skip(f"this nvcc does not know sm_{architecture}")
    with TemporaryDirectory() as folder:
        try:
            output = compile_kernels(nvcc, source, architecture, Path(folder))
        except subprocess.CalledProcessError as error:
            pytest.fail(error.stdout)
        return reports(output, source, Path(folder))


architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


@architectures
@pytest.mark.parametrize("source", SOURCES)
def test_kernels_compile_without_warnings_spills_or_stack(source: str, architecture: str) -> None:
    found = compiled(source, architecture)
    assert found
    for name, report in found.items():
        assert report.spill_bytes == 0, f"{name} spills {report.spill_bytes} bytes"
        assert report.stack_bytes == 0, f"{name} has {report.stack_bytes} bytes of stack"
        limit = COPY_REGISTERS_MAX if name in COPY_KERNELS else ATTENTION_REGISTERS_MAX
        assert report.registers <= limit, f"{name} takes {report.registers} registers"


@architectures
@pytest.mark.parametrize("name", COPY_KERNELS)
def test_a_copy_loop_loads_16_bytes_four_times_before_it_stores(
    name: str, architecture: str
) -> None:
    report = compiled("kv_copy", architecture)[name]
    assert has_wide_loop(report.ptx_moves, "ld.global.cs.v4.u32", "st.global.cs.v4.u32")
    if report.sass_moves is not None:
        assert has_wide_loop(report.sass_moves, "LDG.E.EF.128", "STG.E.EF.128")


@architectures
def test_attention_reads_rows_16_bytes_at_a_time(architecture: str) -> None:
    """Keys and values of four tokens; nothing of them by smaller loads."""
    for name, report in compiled("paged_attention", architecture).items():
        if name.startswith("paged_attention"):
            wide = [move for move in report.ptx_moves if move == "ld.global.cg.v4.u32"]
            assert len(wide) == 8, name
            assert not [move for move in report.ptx_moves if move.startswith("ld.global.u16")]


@pytest.mark.parametrize("source", SOURCES)
def test_the_twin_knows_every_kernel_and_all_arguments_are_64_bits(source: str) -> None:
    twins = twin_argument_counts()
    for name, report in compiled(source, "90").items():
        assert report.parameters == (".u64",) * twins[name]


def has_wide_loop(moves: Sequence[str], load: str, store: str) -> bool:
    """Four loads in a row, then four stores."""
    pattern = [load] * 4 + [store] * 4
    return any(list(moves[start : start + 8]) == pattern for start in range(len(moves) - 7))


def twin_argument_counts() -> dict[str, int]:
    text = (KERNELS / "host_twin.cpp").read_text(encoding="utf-8")
    return {name: int(count) for name, count in re.findall(r'\{"(\w+)", (\d+),', text)}


def test_narrow_or_interleaved_loops_are_told_apart() -> None:
    """That the test of the loops can fail."""
    assert has_wide_loop(["L"] * 4 + ["S"] * 4, "L", "S")
    assert not has_wide_loop(["L", "S"] * 4, "L", "S")
    assert not has_wide_loop(["L"] * 4 + ["S"] * 3 + ["T"], "L", "S")
