"""The programs in examples/ do what they say, as a reader would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import RunningDaemon, running_daemon

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(dram_bytes="16MiB", slab_bytes="8MiB") as running:
        running.wait_populated()
        yield running


def said(socket: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / words[0]), *words[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "KVTIER_SOCKET": str(socket)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_one_process_onboards_what_another_offloaded(daemon: RunningDaemon) -> None:
    program = "offload_onboard.py"
    assert said(daemon.socket, program, "onboard") == "onboarded nothing: MISS"
    assert said(daemon.socket, program, "offload") == "offloaded 10 blocks: ['READY']"
    assert said(daemon.socket, program, "offload") == "offloaded 10 blocks: ['PRESENT']"
    assert said(daemon.socket, program, "onboard") == "onboarded 10 of 10 blocks, 10 equal"


def test_without_a_daemon_an_example_goes_on(tmp_path: Path) -> None:
    out = said(tmp_path / "none.sock", "offload_onboard.py", "onboard")
    assert out.startswith("without kvtier: Unavailable: ")


def test_every_example_is_named_in_the_readme() -> None:
    text = (EXAMPLES.parent / "README.md").read_text()
    missing = [path.name for path in EXAMPLES.glob("*.py") if f"examples/{path.name}" not in text]
    assert not missing
