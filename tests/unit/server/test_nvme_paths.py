"""Every path that is not what it should be is one line, and nothing of it is touched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.config import NvmeConfig
from kvtier.errors import ConfigError
from kvtier.io.file import FileDriver
from kvtier.pools.nvme_paths import format_paths
from kvtier.server import nvme_paths
from kvtier.server.nvme_paths import NvmePaths, open_paths

SEGMENT_BYTES = 1 << 20
LENGTH_BYTES = 8 << 20


def pool_at(*paths: Path) -> None:
    format_paths(
        paths,
        LENGTH_BYTES,
        pool_id=b"p" * 16,
        generation=7,
        segment_bytes=SEGMENT_BYTES,
        row_count_max=64,
    )


def config_of(*paths: Path, length_bytes: int = -1) -> NvmeConfig:
    return replace(NvmeConfig(), paths=tuple(map(str, paths)), bytes=length_bytes, depth=1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools that the daemon makes have small segments here."""

    def make(paths: list[Path], length_bytes: int, **others: object) -> None:
        format_paths(
            paths,
            length_bytes,
            segment_bytes=SEGMENT_BYTES,
            row_count_max=64,
            **others,  # type: ignore[arg-type]
        )

    monkeypatch.setattr(nvme_paths, "format_paths", make)


def opened(config: NvmeConfig) -> NvmePaths:
    found = open_paths(config)
    found.close()
    return found


def refusal(config: NvmeConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        open_paths(config)
    line = str(caught.value)
    assert line.startswith("nvme.paths: ")
    assert "\n" not in line
    return line


def test_paths_of_one_pool_are_opened_in_any_order(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    pool_at(*paths)
    found = opened(config_of(*reversed(paths)))
    assert [driver.name for driver in found.drivers] == [str(path) for path in paths]
    assert found.capacity_bytes == 3 * 7 * SEGMENT_BYTES


def test_missing_path_names_what_makes_it(tmp_path: Path) -> None:
    assert "kvtier format" in refusal(config_of(tmp_path / "absent"))
    assert not (tmp_path / "absent").exists()


@pytest.mark.usefixtures("small")
def test_absent_and_empty_files_are_made_when_bytes_say_so(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    second.touch()
    config = config_of(first, second, length_bytes=LENGTH_BYTES)
    assert opened(config).capacity_bytes == 2 * 7 * SEGMENT_BYTES
    assert first.stat().st_size == LENGTH_BYTES
    before = first.read_bytes()
    opened(config_of(first, second, length_bytes=2 * LENGTH_BYTES))  # It keeps its size.
    assert first.read_bytes() == before


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("length_bytes", [-1, LENGTH_BYTES])
@pytest.mark.parametrize("held", [b"somebody's data", bytes(LENGTH_BYTES)])
def test_file_that_holds_something_is_refused_and_stays_as_it_is(
    tmp_path: Path, length_bytes: int, held: bytes
) -> None:
    path = tmp_path / "file"
    path.write_bytes(held)
    assert "not a pool of kvtier" in refusal(config_of(path, length_bytes=length_bytes))
    assert path.read_bytes() == held


@pytest.mark.usefixtures("small")
def test_pool_with_a_path_too_few_is_not_completed(tmp_path: Path) -> None:
    there, absent = tmp_path / "there", tmp_path / "absent"
    pool_at(there)
    before = there.read_bytes()
    assert "kvtier format" in refusal(config_of(there, absent, length_bytes=LENGTH_BYTES))
    assert not absent.exists()
    assert there.read_bytes() == before


def test_path_in_use_is_refused_and_the_others_are_given_back(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    pool_at(*paths)
    other = FileDriver(paths[1])
    assert "in use" in refusal(config_of(*paths))
    FileDriver(paths[0]).close()  # Nobody holds it any more.
    other.close()
    opened(config_of(*paths))


def test_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path / "none" / "pool", length_bytes=LENGTH_BYTES)
    assert "folder" in refusal(config)
