"""`kvtier format FOLDER`: an empty folder becomes a remote engine; no other does unasked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.pools.remote.files import MARK_NAME, MARK_TEXT


def run_tool(*words: object) -> int:
    return main.main([str(word) for word in ("format", *words)])


def test_an_empty_folder_is_marked_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool(tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["was_formatted"] is False
    assert (tmp_path / MARK_NAME).read_text() == MARK_TEXT
    (tmp_path / "values").mkdir()
    assert run_tool(tmp_path) == 0
    assert "already" in capsys.readouterr().out
    assert (tmp_path / "values").is_dir()


def test_a_folder_that_holds_something_is_refused_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis").write_text("mine")
    assert run_tool(tmp_path) == 2
    assert "holds something; --force" in capsys.readouterr().err
    assert not (tmp_path / MARK_NAME).exists()
    assert run_tool(tmp_path, "--force") == 0
    assert (tmp_path / MARK_NAME).exists()
    assert (tmp_path / "thesis").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "line"),
    [(("other",), "give it alone"), (("--bytes", "1GiB"), "set remote.capacity_bytes")],
)
def test_a_folder_has_neither_a_size_nor_company(
    tmp_path: Path, words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, others = tmp_path / "share", [tmp_path / word for word in words if word == "other"]
    folder.mkdir()
    assert run_tool(folder, *others, *words[len(others) :]) == 2
    assert line in capsys.readouterr().err
    assert not list(folder.iterdir())
