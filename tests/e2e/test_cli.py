"""The command line as a user runs it: real processes, a real daemon, tiny sizes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.connect import CONNECT_SECONDS
from tests.support.daemon import RunningDaemon, running_daemon

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_OUTPUT_CLOSED = 141
BLOCK = 64 << 10


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(dram_bytes="32MiB", slab_bytes="8MiB") as running:
        running.wait_populated()
        yield running


def kvtier(
    *words: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtier.cli.main", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
    )


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    """Standard output must be one JSON document and nothing else."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_version() -> None:
    done = kvtier("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("kvtier ")


@pytest.mark.parametrize("command", [("stats",), ("check",), ("put", __file__)])
def test_an_absent_daemon_is_one_line_that_says_what_to_do(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "nobody.sock"
    done = kvtier(*command, "--socket", path, "--json")
    assert done.returncode == EXIT_UNAVAILABLE
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert str(path) in done.stderr
    assert "kvtier serve" in done.stderr


def test_a_socket_that_nobody_listens_on_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(path))
    started = time.monotonic()
    done = kvtier("stats", "--socket", path)
    assert time.monotonic() - started < CONNECT_SECONDS
    assert done.returncode == EXIT_UNAVAILABLE
    assert done.stderr.count("\n") == 1
    assert "left behind" in done.stderr


@pytest.mark.parametrize("words", [("check",), ("stats",), ("stats", "--json", "--watch", "0.1")])
def test_a_reader_that_goes_away_is_no_failure(
    daemon: RunningDaemon, words: tuple[str, ...]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "kvtier.cli.main", *words],
            env={**os.environ, "KVTIER_SOCKET": str(daemon.socket)},
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.stderr == ""
    assert done.returncode == EXIT_OUTPUT_CLOSED


def test_stats_tell_the_pool_and_their_own_session(daemon: RunningDaemon) -> None:
    found = json_of(kvtier("stats", "--socket", daemon.socket, "--json"))
    assert found["tiers"][0]["populated_bytes"] == 32 << 20
    assert [one["name"] for one in found["sessions"]] == ["kvtier stats"]
    assert found["counters"]["kvtier_uptime_seconds"] > 0
    text = kvtier("stats", env={"KVTIER_SOCKET": str(daemon.socket)}).stdout
    assert "dram" in text
    assert "kvtier stats" in text


def test_watched_stats_are_one_line_of_json_each_time(daemon: RunningDaemon) -> None:
    command = [sys.executable, "-m", "kvtier.cli.main", "stats", "--json", "--watch", "0.1"]
    process = subprocess.Popen(
        [*command, "--socket", str(daemon.socket)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    assert lines[0]["uptime_seconds"] < lines[2]["uptime_seconds"]


def test_a_healthy_daemon_passes_the_check(daemon: RunningDaemon) -> None:
    found = json_of(kvtier("check", "--socket", daemon.socket, "--json"))
    assert found["violations"] == []


def test_a_file_comes_back_as_it_was(daemon: RunningDaemon, tmp_path: Path) -> None:
    content = os.urandom(5 * BLOCK + 17)
    source, receipt, copy = tmp_path / "a.bin", tmp_path / "receipt", tmp_path / "copy"
    source.write_bytes(content)
    at = ("--socket", daemon.socket, "--json")

    put = kvtier("put", source, "--block-bytes", "64KiB", "--namespace", "t", *at)
    receipt.write_text(put.stdout)
    assert json_of(put)["ready_count"] == json_of(put)["resident_count"] == 6
    assert (
        json_of(kvtier("put", source, "--block-bytes", BLOCK, "--namespace", "t", *at))[
            "present_count"
        ]
        == 6
    )
    matched = json_of(kvtier("match", receipt, *at))
    assert (matched["matched_count"], matched["block_count"]) == (6, 6)
    assert matched["matched_bytes"] == len(content)
    assert (matched["memory_count"], matched["tiers"]) == (6, {"dram": 6})
    text = kvtier("match", receipt, "--socket", daemon.socket).stdout
    assert text == "6 of 6 blocks are resident: 6 in dram\n"
    assert json_of(kvtier("get", receipt, "-o", copy, *at))["complete"] is True
    assert copy.read_bytes() == content


def test_a_file_larger_than_the_pool_is_not_called_resident(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    source, receipt = tmp_path / "large.bin", tmp_path / "receipt"
    source.write_bytes(os.urandom(40 << 20))
    put = kvtier("put", source, "--block-bytes", "1MiB", "--socket", daemon.socket, "--json")
    assert put.returncode == EXIT_FAILED, "40 blocks in a pool of 32 MiB"
    resident_count = json.loads(put.stdout)["resident_count"]
    assert 0 <= resident_count < 40
    assert f"only {resident_count} of 40 blocks are resident" in put.stderr
    receipt.write_text(put.stdout)
    matched = json_of(kvtier("match", receipt, "--socket", daemon.socket, "--json"))
    assert matched["matched_count"] == resident_count


def test_missing_blocks_leave_no_file(daemon: RunningDaemon, tmp_path: Path) -> None:
    receipt, copy = tmp_path / "receipt", tmp_path / "copy"
    receipt.write_text(
        json.dumps(
            {
                "form": "kvtier-file-1",
                "name": "a.bin",
                "namespace": "t",
                "block_bytes": BLOCK,
                "file_bytes": 2 * BLOCK,
                "hashes": ["11" * 32, "22" * 32],
            }
        )
    )
    done = kvtier("get", receipt, "-o", copy, "--socket", daemon.socket, "--json")
    assert done.returncode == EXIT_FAILED
    assert json.loads(done.stdout)["complete"] is False
    assert list(tmp_path.iterdir()) == [receipt]


def test_a_file_that_is_no_receipt_is_refused_by_name(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("{}")
    for words in (("get", wrong, "-o", tmp_path / "copy"), ("match", wrong)):
        done = kvtier(*words, "--socket", daemon.socket)
        assert done.returncode == EXIT_USAGE
        assert "no receipt" in done.stderr
    assert not (tmp_path / "copy").exists()


# ------------------------------------------------------------------------------------ benchmarks


def bench(name: str, *words: object, temp: Path | None = None) -> Any:
    env = {} if temp is None else {"TMPDIR": str(temp)}
    return json_of(kvtier("bench", name, *words, "--json", env=env))


@pytest.fixture
def temp() -> Iterator[Path]:
    """Temporary directory of a benchmark, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="kvt-", dir="/tmp") as directory:
        yield Path(directory)
        assert list(Path(directory).iterdir()) == [], "something was left behind"
        assert processes_about(directory) == []


def processes_about(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if word in command:
            found.append(command)
    return found


def test_bench_match_answers_right_and_leaves_nothing(temp: Path) -> None:
    found = bench("match", "--tokens", 1024, "--resident", 3000, "--chains", 60, temp=temp)
    assert found["wrong_answers"] == 0
    assert (found["chains"], found["chain_blocks"]) == (60, 64)
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert found["targets"]["p50_ms"]["at_most"] == 0.8
    assert found["environment"]["python"]


@pytest.mark.parametrize("name", ["churn", "transfer"])
def test_a_benchmark_with_a_pool_too_small_blames_its_arguments(name: str, temp: Path) -> None:
    done = kvtier("bench", name, "--pool-bytes", "1MiB", env={"TMPDIR": str(temp)})
    assert done.returncode == EXIT_USAGE, done.stderr
    assert "ConfigError" in done.stderr


def test_bench_transfer_moves_the_right_bytes_and_leaves_nothing(temp: Path) -> None:
    sizes = ("--bytes", "8MiB", "--small-bytes", "4MiB", "--pool-bytes", "96MiB")
    found = bench("transfer", "--rounds", 2, *sizes, temp=temp)
    assert found["wrong_bytes"] == 0
    assert found["offload_ratio"] > 0
    assert found["onboard_gb_s_64"] > 0


def test_bench_daemon_measures_start_memory_and_idleness(temp: Path) -> None:
    sizes = ("--starts", 1, "--idle-seconds", 1, "--pool-bytes", "64MiB")
    found = bench("daemon", *sizes, temp=temp)
    assert 0 < found["start_s"] < 30
    assert 10 < found["rss_mib"] < 400
    assert found["pool_mib"] >= 64


def test_bench_churn_finds_no_wrong_block(temp: Path) -> None:
    sizes = ("--pool-bytes", "8MiB", "--block-bytes", "64KiB")
    found = bench("churn", "--seconds", 2, "--engines", 2, *sizes, temp=temp)
    assert found["violations"] == []
    assert found["wrong_blocks"] == 0
    assert found["read_blocks"] > 0
    assert found["evicted_blocks"] > 0, "the pool is too large to show evictions"


def test_bench_policy_measures_both_daemons_under_eviction(temp: Path) -> None:
    sizes = ("--turns", 2, "--turn-seconds", 1, "--warm-turns", 2, "--engines", 1)
    found = bench("policy", "--block-tokens", 64, "--pool-blocks", 2048, *sizes, temp=temp)
    assert found["violations"] == []
    assert found["targets"]["core_percent_64"]["at_most"] == 5.0
    assert len(found["core_percent_turns_64"]) == 2
    for policy in ("lru", "curves"):
        assert found[f"{policy}_us_64"] > 0
        assert found[f"{policy}_hit_ratio_64"] > 0
        assert found[f"{policy}_evicted_blocks_64"] > 2048, "the pool was not full"
        assert found[f"{policy}_refused_blocks_64"] == 0
    orders = [found[f"{policy}_order_64"] for policy in ("lru", "curves")]
    assert orders == ["", "unguarded"], "they are not daemons of these policies"


def test_a_missed_target_fails_a_strict_benchmark(daemon: RunningDaemon) -> None:
    done = kvtier(
        *("bench", "match", "--tokens", 1024, "--resident", 200, "--chains", 9),
        *("--socket", daemon.socket, "--json", "--strict"),
    )
    assert done.stdout, done.stderr
    missed = [one for one in json.loads(done.stdout)["targets"].values() if not one["met"]]
    assert (done.returncode == EXIT_FAILED) is bool(missed)
    assert missed, "so few blocks cannot meet the bytes a block"


def test_a_benchmark_on_a_running_daemon_leaves_it_running(daemon: RunningDaemon) -> None:
    bench("churn", "--seconds", 1, "--engines", 1, "--socket", daemon.socket)
    assert daemon.process.poll() is None
    assert json_of(kvtier("check", "--socket", daemon.socket, "--json"))["violations"] == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_removes_its_daemon(temp: Path, signum: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtier.cli.main", "bench", "churn", "--seconds", "60"],
        env={**os.environ, "TMPDIR": str(temp)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            if "play" in line:
                break
        time.sleep(0.2)
        process.send_signal(signum)
        assert process.wait(20) == 128 + signum
