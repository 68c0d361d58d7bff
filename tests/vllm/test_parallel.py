"""Engines of several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forms import rounds, state_finding
from tests.vllm.half_copies import FOLDER_VARIABLE
from tests.vllm.versions import needs_engine

pytestmark = [pytest.mark.vllm, needs_engine]


@pytest.mark.full_form
@pytest.mark.timeout(600)
def test_two_ranks_say_the_same_hit_after_restarts_and_leave_no_half_block(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """A rank is killed with half of its part of a block written; the other's is whole."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        FOLDER_VARIABLE: str(tmp_path),
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    }
    words = [str(tiny_llama), str(tmp_path), str(rounds(short=1, full=2))]
    log = tmp_path / "log"
    with log.open("w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "tests.vllm.parallel_story", *words],
            stdout=out,
            stderr=out,
            env=environment,
            check=False,
        )
    text = log.read_text()
    assert done.returncode == 0, text[-6000:]
    state_finding("\n".join(line for line in text.splitlines() if " s " in line[:12]))
