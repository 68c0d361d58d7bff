"""NVMe pools in real files, and the tools for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.errors import ConfigError
from kvtier.pools.nvme import NvmePool
from kvtier.pools.nvme_paths import format_paths, open_paths
from tests.support.nvme_pools import (
    GENERATION,
    LENGTH_BYTES,
    POOL_ID,
    ROW_COUNT_MAX,
    SEGMENT_BYTES,
    SHARDED,
    BookedPool,
    demote,
)


def test_a_formatted_pool_is_not_formatted_again_unasked(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    facts = {
        "pool_id": POOL_ID,
        "generation": GENERATION,
        "segment_bytes": SEGMENT_BYTES,
        "row_count_max": ROW_COUNT_MAX,
    }
    [superblock] = format_paths([path], LENGTH_BYTES, **facts)  # type: ignore[arg-type]
    assert path.stat().st_size == LENGTH_BYTES
    assert path.stat().st_blocks * 512 >= LENGTH_BYTES
    assert superblock.geometry.length_bytes <= LENGTH_BYTES
    with pytest.raises(ConfigError, match="is a pool of kvtier already; --force"):
        format_paths([path], 2 * LENGTH_BYTES, **facts)  # type: ignore[arg-type]
    assert path.stat().st_size == LENGTH_BYTES
    [driver] = open_paths([path])
    with pytest.raises(ConfigError, match="in use by another process"):
        format_paths([path], 2 * LENGTH_BYTES, force=True, **facts)  # type: ignore[arg-type]
    driver.close()
    assert path.stat().st_size == LENGTH_BYTES
    format_paths([path], 2 * LENGTH_BYTES, force=True, **facts)  # type: ignore[arg-type]
    (tmp_path / "mine").write_bytes(b"my thesis")
    with pytest.raises(ConfigError, match="holds something that is not kvtier's"):
        format_paths([tmp_path / "new", tmp_path / "mine"], LENGTH_BYTES, **facts)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def run_tool(*words: object) -> int:
    return main.main([str(word) for word in words])


def make_pool(paths: list[Path], capsys: pytest.CaptureFixture[str]) -> list[int]:
    """Formatted by the tool, with blocks in it and closed cleanly; the blocks' slots."""
    words = ["format", *paths, "--bytes", "4MiB", "--segment-bytes", "64KiB", "--json"]
    assert run_tool(*words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["usable_bytes"] == told["segments"] * (64 << 10)
    pool = BookedPool(open_paths(paths))
    pool.recover({})
    small, _ = demote(pool, [f"{number}" for number in range(20)])
    sharded, _ = demote(pool, ["x", "y"], namespace="other", layout=SHARDED)
    assert pool.close(clean=True)
    return [*small.tolist(), *sharded.tolist()]


def test_fsck_finds_every_block_right_and_then_the_one_that_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    slots = make_pool(paths, capsys)
    assert run_tool("fsck", *reversed(paths), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["blocks"], told["right_blocks"], told["was_clean"]) == (22, 22, True)
    assert told["payload_bytes"] == 20 * 4_000 + 2 * 2 * 4_097
    pool = NvmePool(open_paths(paths), writable=False)
    first = pool.geometry.segments_first
    pool.close(clean=False)
    with paths[0].open("r+b") as file:
        file.seek(first + 4096 + 3_999)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    assert run_tool("fsck", *paths, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["right_blocks"], told["corrupt_blocks"]) == (21, 1)
    assert [one["slot"] for one in told["bad"]] == [1]
    assert 1 in slots
    assert run_tool("fsck", *paths) == 1
    assert "segment 0, slot 1: corrupt" in capsys.readouterr().out


def test_tools_refuse_what_is_no_whole_pool_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    make_pool(paths, capsys)
    (tmp_path / "mine").write_bytes(bytes(100_000))
    cases = [
        (["fsck", paths[1]], "belongs to a pool of 2 paths, given are 1; missing: 1"),
        (["fsck", tmp_path / "none"], "No such file or directory"),
        (["fsck", tmp_path / "mine"], "is not a pool of kvtier"),
        (["format", paths[0], "--bytes", "4MiB"], "is a pool of kvtier already"),
        (["format", tmp_path / "new"], "say how large the file shall be"),
        (["format", tmp_path / "new", "--bytes", "1MiB"], "too few for one segment"),
    ]
    for words, message in cases:
        assert run_tool(*words) == 2
        told = capsys.readouterr().err
        assert message in told
        assert told.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert run_tool("fsck", *paths) == 0


def test_fsck_refuses_a_pool_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pool"
    make_pool([path], capsys)
    pool = NvmePool(open_paths([path]))
    assert run_tool("fsck", path) == 2
    assert "is in use by another process" in capsys.readouterr().err
    pool.close(clean=False)


def test_recovery_is_measured_against_a_dict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "recovery", "--slots", "3000", "--rounds", "1", "--json"]
    assert run_tool(*words, "--path", tmp_path) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["slots"] == 3000
    assert 0 < told["dict_build_s"] < told["recovery_s"] <= told["recovery_median_s"]
    parts = [told[name] for name in ("open_s", "read_s", "chains_s", "index_s")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(told["recovery_s"])
    assert isinstance(told["table_was_cold"], bool)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_bench_of_the_tier_runs_without_fio_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["bench", "nvme", "--bytes", "256MiB", "--rounds", "1", "--strict", "--json"]
    assert run_tool(*words, "--path", tmp_path) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["fio"] == "fio is not installed"
    assert "fio is not installed: no ratios" in captured.err
    assert "write_ratio" not in told
    assert told["blocks"] == 128
    assert min(told["write_gbps"], told["read_gbps"], told["write_us_base"]) > 0
    assert list(tmp_path.iterdir()) == []


FIO = """#!/bin/sh
case "$*" in
    *io_uring*) exit 1 ;;
    *libaio*) speed=2000000000 ;;
    *) speed=1000000000 ;;
esac
side="{\\"bw_bytes\\": $speed}"
echo "{\\"jobs\\": [{\\"usr_cpu\\": 5, \\"sys_cpu\\": 5, \\"read\\": $side, \\"write\\": $side}]}"
"""


@pytest.mark.slow
def test_the_bench_of_the_tier_is_compared_with_the_engines_of_fio_that_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fio").write_text(FIO)
    (tmp_path / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["bench", "nvme", "--bytes", "256MiB", "--rounds", "1", "--json"]
    assert run_tool(*words, "--path", tmp_path) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fio_engine"] == "libaio"
    for side in ("write", "read"):
        assert told[f"{side}_ratio"] == pytest.approx(told[f"{side}_gbps"] / 2)
        assert told[f"{side}_ratio_threads"] == pytest.approx(told[f"{side}_gbps"])
        assert told[f"{side}_us_huge"] > 0
        assert told[f"fio_{side}_us"] == pytest.approx(0.1 * told["block_bytes"] / 2000)
    assert set(told["targets"]) == {"write_ratio", "read_ratio"}
    assert told["neighbour_cores"] >= 0
