"""Compiles kernels with nvcc, and reads what came out: what ptxas says, PTX, and SASS if it can."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.kernel_twin import KERNELS

SOURCES = ("kv_copy", "paged_attention")
ARCHITECTURES = ("80", "90", "100")

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_\w+'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_PTX_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)", re.DOTALL)
_PTX_MOVE = re.compile(r"^\s*(?:@%?\w+ )?((?:ld|st)\.global[\w.]*)", re.MULTILINE)
_SASS_MOVE = re.compile(r"\b((?:LD|ST|LDG|STG|LDL|STL)(?:\.[A-Z0-9]+)*) ")


@dataclass(frozen=True)
class KernelReport:
    """Of one kernel on one architecture; the moves are its loads and stores in order."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    parameters: tuple[str, ...]
    ptx_moves: tuple[str, ...]
    sass_moves: tuple[str, ...] | None  # None: no cuobjdump here.


def find_tool(name: str) -> str | None:
    places = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{p}/bin" for p in places if p)])
    return shutil.which(name, path=path)


def supported_architectures(nvcc: str) -> set[str]:
    listed = subprocess.run(
        [nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"compute_(\d+)", listed))


def compile_kernels(nvcc: str, source: str, architecture: str, folder: Path) -> str:
    """Cubin and PTX into the folder; the compiler's whole output, or CalledProcessError."""
    done = subprocess.run(
        [
            *(nvcc, "-cubin", f"-arch=sm_{architecture}", "-std=c++17", "-Xptxas", "-v"),
            *("-Werror", "all-warnings", "--keep", "--keep-dir", str(folder)),
            *("-o", str(folder / f"{source}.cubin"), str(KERNELS / f"{source}.cu")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


def reports(output: str, source: str, folder: Path) -> dict[str, KernelReport]:
    ptx = (folder / f"{source}.ptx").read_text(encoding="utf-8")
    bodies = {match[1]: (match[2], _body(ptx, match.end())) for match in _PTX_ENTRY.finditer(ptx)}
    sass = _sass_by_kernel(folder / f"{source}.cubin")
    found = {}
    for name, part in _parts(output).items():
        [(stack, stores, loads)] = _STACK.findall(part)
        parameters, body = bodies[name]
        found[name] = KernelReport(
            registers=int(_REGISTERS.findall(part)[0]),
            stack_bytes=int(stack),
            spill_bytes=int(stores) + int(loads),
            parameters=tuple(re.findall(r"\.param (\.\w+)", parameters)),
            ptx_moves=tuple(_PTX_MOVE.findall(body)),
            sass_moves=None if sass is None else tuple(_SASS_MOVE.findall(sass[name])),
        )
    return found


def _parts(output: str) -> dict[str, str]:
    """What ptxas says of each kernel."""
    pieces = _ENTRY.split(output)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def _body(ptx: str, start: int) -> str:
    """Up to the next kernel; braces may nest."""
    end = ptx.find(".visible .entry", start)
    return ptx[start : end if end >= 0 else len(ptx)]


def _sass_by_kernel(cubin: Path) -> dict[str, str] | None:
    tool = find_tool("cuobjdump")
    if tool is None:
        return None
    listed = subprocess.run([tool, "-sass", str(cubin)], capture_output=True, text=True, check=True)
    pieces = re.split(r"Function : (\w+)", listed.stdout)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))
