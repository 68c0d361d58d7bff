"""The wheel, built as `make wheel` builds it, and put where an installed kvtier would be."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(folder: Path) -> Path:
    """From a copy, so that no build output is left in the repository."""
    pytest.importorskip("setuptools", minversion="77")
    with tempfile.TemporaryDirectory(prefix="kvtier-tree-") as name:
        tree = Path(name)
        for file in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / file, tree)
        for part in ("kvtier", "kernels"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, tree / part, symlinks=True, ignore=ignored)
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"),
                *("--no-index", "--disable-pip-version-check", "--wheel-dir", str(folder)),
                str(tree),
            ],
            check=True,
        )
    [wheel] = folder.glob("*.whl")
    return wheel


def unpack_wheel(wheel: Path, folder: Path) -> Path:
    """The folder from which an installed kvtier is imported."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
