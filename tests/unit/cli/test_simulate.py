"""`kvtier simulate` on a trace of a few requests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvtier.cli.charts import Chart, cumulative, draw
from kvtier.cli.main import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [
        {"kvtrace": 1, "name": "tiny", "block_tokens": 512, "time_unit": "s", "scope": "global"}
    ]
    lines += [
        {"t": number, "in": 512 * 4, "out": 3, "b": [4 * (number % 3), 4]} for number in range(12)
    ]
    path = tmp_path / "tiny.kvt.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def test_a_sweep_is_a_table_json_and_plots(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", str(trace), "--sweep", "50%,200%", "--policies", "lru,arc"]
    assert main([*words, "--json", "--plot", str(tmp_path / "plots")]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(one["policy"], one["dram"]) for one in results] == [
        *(("lru", "50%"), ("lru", "200%"), ("arc", "50%"), ("arc", "200%")),
    ]
    assert results[1]["hit_ratio"] == 0.75
    assert results[1]["hit_ratio_by_tier"] == {"dram": 0.75}
    for name in ("hits.svg", "ttft.svg"):
        ElementTree.parse(tmp_path / "plots" / name)
    assert main([*words, "--policy-only"]) == 0
    assert "0.7500" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--dram", "none"], "is no size"),
        (["--policy", "best"], "there is lru, curves, arc"),
        (["--engines", "0"], "must be above 0"),
        (["--dram", "1KiB"], "hold no block"),
    ],
)
def test_mistakes_are_one_line(
    trace: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace), *words]) == 2
    told = capsys.readouterr().err
    assert reason in told
    assert told.count("\n") == 1


def test_a_chart_is_the_same_for_the_same_figures() -> None:
    chart = Chart("a <b>", "x", "y", {"one & two": [(1.0, 0.5), (1000.0, 1.0)]})
    assert draw(chart) == draw(chart)
    ElementTree.fromstring(draw(chart))


def test_a_cumulative_line_ends_at_one() -> None:
    line = cumulative([3.0, 1.0, 2.0])
    assert line[-1] == (3.0, 1.0)
    assert [y for _, y in line] == sorted(y for _, y in line)
    assert cumulative([]) == []
