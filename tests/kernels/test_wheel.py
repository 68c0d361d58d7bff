"""The wheel brings the kernels' sources, and what it brings is what was tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernel_twin import KERNELS
from tests.support.wheel import build_wheel, unpack_wheel

pytestmark = pytest.mark.slow

# Compiles with the installed package's sources, not with the repository's.
ASK = """
import json, sys
from kvtier.cuda import kernel_cache
print(json.dumps({"place": kernel_cache.__file__, "sources": kernel_cache.sources(),
                  "hash": kernel_cache.source_hash()}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    return unpack_wheel(build_wheel(folder), folder / "installed")


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
