"""The command `kvtier selftest vllm` with a private daemon, and a stand-in for vLLM's Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tidy.sources import ROOT

pytestmark = pytest.mark.slow

FAKE = ROOT / "tests" / "support" / "fake_trial.py"
SIZES = "--tokens 128 --prompts 2 --rounds 1 --requests 2 --output-tokens 4 --dram-bytes 64MiB"


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "{FAKE}" "$@"\n')
    path.chmod(0o755)
    return path


def command(python: Path, *words: str) -> list[str]:
    start = [sys.executable, "-m", "kvtier.cli.main", "selftest", "vllm", "--model", "m"]
    start += ["--python", str(python), f"--vllm-arg=--held={python.parent / 'held'}"]
    return [*start, *SIZES.split(), *words]


def selftest(
    python: Path, *words: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(python, *words),
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | (env or {}),
    )


def test_right_engine_gets_a_report_and_exit_code_0(fake_python: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    done = selftest(fake_python, "--json", "--report", str(report))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["holds"] is True
    assert found["figures"]["hit_tokens"] == [96, 96]
    assert "Every check holds" in report.read_text()


def test_wrong_tokens_give_exit_code_1_and_the_report_on_standard_output(fake_python: Path) -> None:
    done = selftest(fake_python, "--vllm-arg=--fake=wrong_after_hit")
    assert done.returncode == 1
    assert "Some checks do not hold" in done.stdout
    assert "✗ tokens after a hit" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tokens", "10"], "at least 64"),
        (["--vllm-arg=--kv-transfer-config {}"], "set by the self-test"),
        (["--vllm-arg='"], "--vllm-arg"),
        (["--connector-option", "x=1"], "write kvtier.NAME=VALUE"),
        (["--report", "/no/such/folder/x"], "No such file"),
    ],
)
def test_mistakes_give_exit_code_2(fake_python: Path, words: list[str], told: str) -> None:
    done = selftest(fake_python, *words)
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.parametrize(
    ("words", "missing", "told"),
    [
        ([], '["vllm"]', "vLLM is not installed for"),
        ([], '["kvtier"]', "-m pip install kvtier"),
        (["--vllm-arg=--fake=refuse"], "[]", "Unsupported: kvtier: KV on x: run without"),
        (["--python", "/no/such/python"], "[]", "does not run as Python"),
        (["--socket", "/no/such/socket"], "[]", "no daemon at"),
    ],
)
def test_no_vllm_and_no_daemon_give_exit_code_3_and_say_what_to_do(
    fake_python: Path, words: list[str], missing: str, told: str
) -> None:
    done = selftest(fake_python, *words, env={"FAKE_MISSING": missing})
    assert done.returncode == 3, done.stderr
    assert told in done.stderr
    for log in re.findall("whole log: (.*)", done.stderr):
        Path(log).unlink()  # It is there, and stays for whoever reads it.


def test_one_that_is_ended_leaves_no_process_behind_though_its_engine_hangs(
    fake_python: Path,
) -> None:
    words = command(fake_python, "--vllm-arg=--fake=hangs")
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "without kvtier" in process.stderr.readline()
    deadline = time.monotonic() + 30
    while len(children := children_of(process.pid)) < 2:  # The daemon and the engine.
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)  # It may be told to generate meanwhile.
    process.terminate()
    process.wait(20)
    process.stderr.close()
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def children_of(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
