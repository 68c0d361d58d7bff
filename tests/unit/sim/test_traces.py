"""Trace files: what is wrong with one is said by line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvtier.errors import BadRequest
from kvtier.sim.traces import between, mixed, read_sessions, read_trace

HEADER = {"kvtrace": 1, "name": "t", "block_tokens": 4, "time_unit": "ms", "scope": "global"}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "t.kvt.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def request(at: int, tokens: int, blocks: list[int]) -> dict[str, object]:
    return {"t": at, "in": tokens, "out": 1, "b": blocks}


def test_chains_are_read_in_the_order_of_arrival_without_partial_blocks(tmp_path: Path) -> None:
    lines = [request(2000, 10, [7, 2, 90, 1]), request(1000, 8, [7, 2])]
    trace = read_trace(written(tmp_path, HEADER, *lines))
    assert [one.at for one in trace.requests] == [1.0, 2.0]
    assert [one.blocks.tolist() for one in trace.requests] == [[0, 1], [0, 1]]
    assert trace.parent.tolist() == [-1, 0]
    assert trace.access_count == 4


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "empty"),
        ([[1]], "line 1: it is no JSON object"),
        ([{**HEADER, "kvtrace": 2}], "line 1: a trace of form 2"),
        ([{**HEADER, "scope": "session"}], "line 1: its blocks"),
        ([{**HEADER, "time_unit": "h"}], "line 1: 'h'"),
        ([HEADER, {"t": 1}], "line 2: 'b'"),
        ([HEADER, request(1, 8, [1])], "line 2: its runs"),
        ([HEADER, request(1, 8, [1, -1])], "line 2: its runs"),
        ([HEADER, request(1, 8, [-1, 1])], "line 2: block numbers"),
        ([HEADER, request(1, 8, [1, 2]), request(1, 8, [3, 1, 2, 1])], "two parents"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, lines: list[object], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        read_trace(written(tmp_path, *lines))


def test_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER, *[request(one, 8, [1, 2]) for one in range(1000)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadRequest, match="cannot read"):
        read_trace(path)


SESSIONS = {**HEADER, "scope": "session", "time_unit": "s"}


def session(*requests: tuple[float, int, list[int]]) -> dict[str, object]:
    return {"id": "x", "r": [[at, tokens, 1, 0.0, blocks] for at, tokens, blocks in requests]}


def test_sessions_share_no_block_and_larger_blocks_are_those_they_end_with(tmp_path: Path) -> None:
    one = session((0.0, 16, [1, 4]), (5.0, 27, [1, 4, 9, 3]))
    path = written(tmp_path, SESSIONS, one, one)
    trace = read_sessions(path, 8, 1000.0, seed=3)
    assert trace.unique_count == 2 * 3
    # 27 tokens are six blocks of 4 and thus three of 8.
    assert sorted(len(request.blocks) for request in trace.requests) == [2, 2, 3, 3]
    assert trace.access_count == 10
    ends = [request.at for request in trace.requests]
    assert ends == sorted(ends)
    assert read_sessions(path, 8, 1000.0, seed=3).requests[0].at == ends[0]
    assert read_sessions(path, 8, 1000.0, seed=4).requests[0].at != ends[0]


def test_a_size_that_is_no_multiple_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="a multiple of 4"):
        read_sessions(written(tmp_path, SESSIONS), 6, 1.0, seed=1)


def test_tenants_share_a_clock_and_no_block(tmp_path: Path) -> None:
    trace = read_trace(
        written(tmp_path, HEADER, request(1000, 8, [1, 2]), request(3000, 4, [9, 1]))
    )
    late = between(trace, 2.0, 9.0)
    assert [(one.at, one.blocks.tolist()) for one in late.requests] == [(1.0, [0])]
    both = mixed("both", [trace, late])
    assert [(one.at, one.tenant) for one in both.requests] == [(1.0, 0), (1.0, 1), (3.0, 0)]
    assert both.unique_count == 4
    assert both.parent.tolist() == [-1, 0, -1, -1]
