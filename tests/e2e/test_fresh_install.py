"""The wheel in an environment with nothing else: pip brings what it needs, and kvtier runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli.main import COMMANDS
from tests.support.daemon import running_daemon
from tests.support.wheel import ROOT, build_wheel

pytestmark = pytest.mark.slow

# How pip says that it reached no index; anything else it says is a mistake of ours.
UNREACHABLE = ("NewConnectionError", "NameResolutionError", "Could not connect", "timed out")


LIST = """
import importlib.metadata
for one in importlib.metadata.distributions():
    if one.name != "kvtier":
        print(one.name.lower().replace("_", "-"))
"""


def run(*words: str | Path, folder: Path) -> str:
    """Standard output of a command that must not fail, and that knows nothing of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode and any(word in done.stderr for word in UNREACHABLE):
        pytest.skip("pip reaches no package index")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_fresh_install_serves_checks_and_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "fresh", folder=tmp_path)
    python, kvtier = (tmp_path / "fresh" / "bin" / name for name in ("python", "kvtier"))
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile")
    lock = ROOT / "deploy" / "requirements.lock"
    run(*pip, "--require-hashes", "--requirement", lock, folder=tmp_path)
    run(*pip, "--no-deps", build_wheel(tmp_path), folder=tmp_path)
    installed = run(python, "-c", LIST, folder=tmp_path).split()
    pinned = "\n" + lock.read_text()
    assert not [name for name in installed if f"\n{name}==" not in pinned]
    imported = run(python, "-c", "import kvtier; print(kvtier.__path__[0])", folder=tmp_path)
    assert imported.startswith(str(tmp_path / "fresh"))

    (tmp_path / "sent").write_bytes(os.urandom(300_000))
    with running_daemon(program=[str(kvtier), "serve"]) as daemon:
        at = ("--socket", str(daemon.socket))
        assert "all invariants hold" in run(kvtier, "check", *at, folder=tmp_path)
        receipt = run(kvtier, "put", "sent", *at, folder=tmp_path)
        (tmp_path / "receipt").write_text(receipt)
        run(kvtier, "get", "receipt", "-o", "got", *at, folder=tmp_path)
        assert (tmp_path / "got").read_bytes() == (tmp_path / "sent").read_bytes()
        assert "dram" in run(kvtier, "stats", *at, folder=tmp_path)
        if "top" in COMMANDS:
            assert "dram" in run(kvtier, "top", "--once", "--interval", "0.2", *at, folder=tmp_path)
        assert daemon.terminate() == 0
    few = ("--starts", "1", "--idle-seconds", "1", "--pool-bytes", "32MiB")
    measured = json.loads(run(kvtier, "bench", "daemon", *few, "--json", folder=tmp_path))
    assert measured["environment"]["python"]
