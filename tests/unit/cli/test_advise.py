"""`kvtier advise` from a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvtier.cli.main import main

BLOCK_BYTES = 512 << 10


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sixty chains of 8 blocks, in turns: LRU hits all or nothing."""
    header = {"kvtrace": 1, "name": "turns", "block_tokens": 512, "time_unit": "s"}
    lines = [header | {"scope": "global"}]
    lines += [
        {"t": 10 * number, "in": 512 * 8, "out": 1, "b": [8 * (number % 60), 8]}
        for number in range(300)
    ]
    path = tmp_path / "turns.kvt.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def words(trace: Path, dram_blocks: int, *more: str) -> list[str]:
    size = str(dram_blocks * BLOCK_BYTES)
    return ["advise", str(trace), "--dram", size, "--bytes-per-token", "1024", *more]


def test_more_dram_is_worth_what_the_replay_says(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--sample", "1", "--json", "--plot", str(tmp_path)]
    assert main(words(trace, 300, *more)) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["change"]: row for row in told["advice"][""]}
    assert rows["now"]["hit_ratio"] == 0.0
    doubled = rows["DRAM +150.0 MiB"]
    assert doubled["points"] == 80.0
    # 300 requests of 4,096 tokens in 2,990 s; a fifth of them are first uses.
    expected = 0.8 * 300 * 4096 / 2990 * 3600 / 20_000
    assert doubled["gpu_seconds_per_hour"] == pytest.approx(expected, rel=0.01)
    assert max(abs(one["error_points"]) for one in told["errors"][:-1]) < 0.01
    ElementTree.parse(tmp_path / "advice.svg")


def test_thin_samples_are_marked_and_the_error_is_told(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(trace, 300, "--sample", "1/4")) == 0
    told = capsys.readouterr().out
    assert "fewer than 1,000 sampled blocks" in told
    assert "error of the sample against an exact replay" in told


def test_without_a_daemon_it_says_whom_it_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--admin", "127.0.0.1:1"]) == 3
    assert "http://127.0.0.1:1/advice.json does not answer" in capsys.readouterr().err


def test_a_share_that_is_none_is_refused(trace: Path) -> None:
    with pytest.raises(SystemExit):
        main(words(trace, 300, "--sample", "2"))
