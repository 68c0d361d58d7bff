"""Finding libcudart: the one the process has loaded already, or else one of the machine's.

An engine's torch brings its own libcudart. A second one beside it would work (both use the same
context) but would be another version than the tests of that torch ran with, so the loaded one is
taken first.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from kvtier.cuda.errors import CudaUnavailable

MAJORS = (13, 12)
"""CUDA versions whose calls are known here, preferred first."""

CUDART_VARIABLE = "KVTIER_CUDART"
"""Names the libcudart to use, instead of a search."""

_LOADED = re.compile(r"(/\S*/libcudart[^/\s]*\.so[.\d]*)$")
_WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_runtime/lib")


def open_library(path: str | None = None) -> ctypes.CDLL:
    """The libcudart at `path`, or the best one here. Raises CudaUnavailable, saying what was tried.

    CDLL, not PyDLL: calls release the GIL.
    """
    named = path or os.environ.get(CUDART_VARIABLE)
    tried = []
    for name in [named] if named else candidates():
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            tried.append(f"{name} ({error})" if named else name)
    raise CudaUnavailable(
        f"no libcudart of CUDA {' or '.join(map(str, sorted(MAJORS)))} could be loaded:"
        f" {', '.join(tried)}; install one, or name it in {CUDART_VARIABLE}"
    )


def candidates() -> list[str]:
    """Where a libcudart may be, likeliest first, each once."""
    found = [*_loaded(), *(f"libcudart.so.{major}" for major in MAJORS)]
    for folder in _folders():
        found += [str(path) for major in MAJORS for path in folder.glob(f"libcudart.so.{major}*")]
    return list(dict.fromkeys(found))


def _loaded() -> list[str]:
    """Those mapped by this process, static ones excepted: they have no name."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [match[1] for line in lines if (match := _LOADED.search(line))]


def _folders() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield Path(home) / "lib64"
            yield Path(home) / "lib"
    for entry in sys.path:
        for folder in _WHEEL_FOLDERS:
            yield Path(entry) / folder
    for major in MAJORS:
        for root in sorted(Path("/usr/local").glob(f"cuda-{major}*"), reverse=True):
            yield root / "lib64"
            yield root / "lib"
