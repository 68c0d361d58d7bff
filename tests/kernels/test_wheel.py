"""The wheel brings the kernels' sources, and what it brings is what was tested."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.kernel_twin import KERNELS

pytestmark = pytest.mark.slow

ROOT = KERNELS.parent
# Compiles with the installed package's sources, not with the repository's.
ASK = """
import json, sys
from kvtier.cuda import kernel_cache
print(json.dumps({"place": kernel_cache.__file__, "sources": kernel_cache.sources(),
                  "hash": kernel_cache.source_hash()}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked; built from a copy, so that no build output is left in the repository."""
    pytest.importorskip("setuptools", minversion="77")
    tree, folder = (tmp_path_factory.mktemp(name) for name in ("tree", "wheel"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("kvtier", "kernels"):
        shutil.copytree(
            ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"),
            *("--no-index", "--disable-pip-version-check", "--wheel-dir", str(folder), str(tree)),
        ],
        check=True,
    )
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def test_an_installed_package_finds_the_sources_that_were_tested(installed: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={"PYTHONPATH": str(installed)},
        cwd=installed,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["place"].startswith(str(installed))
    files = [*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")]
    assert found["sources"] == {file.name: file.read_text(encoding="utf-8") for file in files}


def test_the_twin_stays_at_home(installed: Path) -> None:
    """It is for tests; the wheel holds no C++ of the host's."""
    assert not list(installed.rglob("*.cpp"))
