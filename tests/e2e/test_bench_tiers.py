"""`kvtier bench tiers` in its smallest form: all tiers or a reason, right bytes, nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import bench_servers
from kvtier.io.nodes import read_nodes

pytestmark = pytest.mark.slow
TINY = ("--blocks", "4", "--block-bytes", "256KiB", "--rounds", "1", "--json")


@pytest.fixture
def temp() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvt-tiers-") as directory:
        yield Path(directory)
        assert list(Path(directory).iterdir()) == [], "something was left behind"
        assert processes_in(directory) == []


def processes_in(directory: str) -> list[str]:
    """Those with files open there: servers write their logs there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(path).startswith(directory):
                found.append(path.parts[2])
        except OSError:
            continue
    return found


def bench(temp: Path, *words: object, path: str = os.environ["PATH"]) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "kvtier.cli.main", "bench", "tiers", *map(str, words), *TINY],
        env={**os.environ, "TMPDIR": str(temp), "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_tier_has_figures_or_a_reason_and_no_byte_is_wrong(temp: Path) -> None:
    found = bench(temp, "--tiers", "dram", "cxl", "cxl_node", "files", "redis", "mooncake")
    here = {"dram", "cxl", "files"}
    here |= {"cxl_node"} if any(node.has_only_memory for node in read_nodes()) else set()
    here |= {"redis"} if bench_servers.redis_binary() else set()
    here |= {"mooncake"} if bench_servers.mooncake_binary() else set()
    measured = {name[: -len("_put_ratio")] for name in found if name.endswith("_put_ratio")}
    assert measured == here
    assert set(found["not_run"]) == {"dram", "cxl", "cxl_node", "files", "redis", "mooncake"} - here
    assert found["wrong_blocks"] == 0
    for tier in here:
        for way in ("put", "get"):
            assert found[f"{tier}_{way}_gbps"] > 0
            assert 0 < found[f"{tier}_{way}_p50_ms"] <= found[f"{tier}_{way}_p99_ms"]
    assert found["targets"]["cxl_put_ratio"]["at_least"] == 0.9


def test_what_cannot_be_run_is_said_with_its_reason(temp: Path) -> None:
    found = bench(temp, "--tiers", "redis", "nvme", path="/nowhere")
    assert found["not_run"] == {
        "redis": "neither valkey-server nor redis-server is installed",
        "nvme": "--path names no directory on the disk to measure",
    }
    assert found["targets"] == {}
