"""Commands on a daemon whose blocks are on NVMe only: where they are, and that they come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nvme_daemon import make_pool, running_nvme_daemon, wait_below, wait_state

pytestmark = pytest.mark.slow

BLOCK_BYTES = 128 << 10
COUNT = 20


def kvtier(*words: object) -> str:
    """Standard output of a command that must not fail."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtier.cli.main", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_file_is_found_and_comes_back_after_the_daemon_was_killed(tmp_path: Path) -> None:
    source, receipt, copy = tmp_path / "a.bin", tmp_path / "receipt", tmp_path / "copy"
    source.write_bytes(os.urandom(COUNT * BLOCK_BYTES))
    make_pool(tmp_path / "pool")
    with running_nvme_daemon(tmp_path / "pool") as daemon:
        at = ("--socket", daemon.socket)
        receipt.write_text(kvtier("put", source, "--block-bytes", BLOCK_BYTES, *at))
        wait_below(daemon, COUNT)
        daemon.restart()
        wait_state(daemon, "on")

        found = json.loads(kvtier("match", receipt, "--json", *at))
        assert (found["matched_count"], found["memory_count"]) == (COUNT, 0)
        assert found["tiers"] == {"nvme": COUNT}
        assert "20 of 20 blocks are resident: 20 in nvme" in kvtier("match", receipt, *at)

        kvtier("get", receipt, "-o", copy, *at)
        assert copy.read_bytes() == source.read_bytes()
        [gets] = [
            line.split() for line in kvtier("stats", *at).splitlines() if line.startswith("get ")
        ]
        # Asked for, hits, share in per cent, in dram, in nvme.
        assert gets[1:] == ["20", "20", "100.0", "%", "0", "20"]
        assert json.loads(kvtier("match", receipt, "--json", *at))["memory_count"] == COUNT
