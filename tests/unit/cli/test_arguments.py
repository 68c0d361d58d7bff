from __future__ import annotations

import argparse

import pytest

from kvtier.cli import main
from kvtier.cli.processes import parse_status
from kvtier.cli.sizes import positive, size


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("2MiB", 2 << 20), ("1 gib", 1 << 30), ("64KiB", 65536)]
)
def test_sizes_may_have_units(text: str, count: int) -> None:
    assert size(text) == count


@pytest.mark.parametrize("text", ["", "0", "2MB", "-1", "1.5MiB", "MiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)


@pytest.mark.parametrize("text", ["0", "-3", "x", "1.5", ""])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        positive(text)


def test_memory_is_told_apart_by_kind() -> None:
    text = "Name:\tx\nVmRSS:\t 70 kB\nRssAnon:\t 10 kB\nRssFile:\t 20 kB\nRssShmem:\t 40 kB\n"
    memory = parse_status(text)
    assert memory.own_bytes == 30 << 10, "the pool's pages are left out"
    assert memory.shared_bytes == 40 << 10


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for command in main.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main.main([command, "--help"])
        assert ended.value.code == 0
        assert f"kvtier {command}" in capsys.readouterr().out


def test_a_command_without_its_arguments_is_a_mistake_in_the_arguments() -> None:
    for words in (["put"], ["get"], ["match"], ["bench"], ["bench", "what"]):
        with pytest.raises(SystemExit) as ended:
            main.main(words)
        assert ended.value.code == main.EXIT_USAGE


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "match", "--tokens", "10"],
        ["bench", "match", "--resident", "10"],
        ["put", "/nowhere/file"],
        ["get", "/nowhere/receipt"],
        ["match", "/proc/self/exe"],
    ],
)
def test_arguments_that_do_not_fit_are_a_mistake_in_the_arguments(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(words) == main.EXIT_USAGE
    assert capsys.readouterr().err.count("\n") == 1
