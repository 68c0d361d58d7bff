"""One name for each concept; docs/vocabulary.md is read, not repeated."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.tidy.sources import PACKAGE, ROOT, has_remark, place, python_files, tree_of

VOCABULARY = ROOT / "docs" / "vocabulary.md"
PROTOCOL = ROOT / "proto" / "kvtier" / "v1" / "kvtier.proto"
METRIC_NAME = re.compile(r"kvtier_[a-z0-9]+(_[a-z0-9]+)+")
# What is counted may stand for the unit; a limit is given as `_used` of `_max`; a `_state` is 1 for
# one label.
METRIC_UNITS = {
    *("bytes", "seconds", "ratio", "total", "count", "info", "used", "max", "state"),
    *("blocks", "slots", "slabs", "segments", "sessions", "leases", "transfers"),
}


@dataclass(frozen=True)
class Ban:
    """A part that no name may have, what to say instead, and the folders that are let off."""

    word: str
    instead: str
    exempt: tuple[str, ...]


@cache
def table_rows(header: str) -> tuple[tuple[str, ...], ...]:
    """The rows of every table in the document whose first heading is `header`."""
    rows: list[tuple[str, ...]] = []
    inside = False
    for line in VOCABULARY.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
        if cells[0] == header:
            inside = True
        elif inside and not set(cells[0]) <= {"-"}:
            rows.append(cells)
    return tuple(rows)


@cache
def bans() -> tuple[Ban, ...]:
    return tuple(
        Ban(word, instead, () if exempt == "–" else tuple(exempt.split(", ")))
        for word, instead, exempt in table_rows("in a name")
    )


def parts_of(name: str) -> list[str]:
    """`BlockChunk`, `block_chunks` and `BLOCK_CHUNK` are all block, chunk."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return [part.lower() for part in spaced.split("_") if part]


def banned_in(name: str, folder: str = "") -> list[Ban]:
    """The bans that the name breaks; `folder` is the module's place below kvtier/."""
    parts = {form for part in parts_of(name) for form in (part, part.removesuffix("s"))}
    return [
        ban
        for ban in bans()
        if ban.word in parts
        and not any(folder == exempt or folder.startswith(exempt + "/") for exempt in ban.exempt)
    ]


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of what the module itself names; what it calls belongs to somebody else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr), node.lineno


def metric_names() -> set[str]:
    return {
        node.value
        for path in python_files("kvtier/metrics")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and METRIC_NAME.fullmatch(node.value)
    }


def protocol_names() -> Iterator[tuple[str, int]]:
    for number, line in enumerate(PROTOCOL.read_text(encoding="utf-8").splitlines(), start=1):
        code = line.partition("//")[0]
        if not code.startswith(("syntax", "package", "import")):
            for name in re.findall(r"[A-Za-z_][A-Za-z0-9_]*", code):
                yield name, number


def test_no_name_in_the_code_is_banned() -> None:
    found = [
        f"{place(path, line)}: {name}: {ban.word!r} here is {ban.instead}"
        for path in python_files("kvtier")
        for name, line in names_in(tree_of(path))
        for ban in banned_in(name, folder_of(path))
        if not has_remark(path, line, "vocabulary")
    ]
    assert not found, "\n".join(found)


def folder_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_no_name_in_the_protocol_is_banned() -> None:
    found = [
        f"{place(PROTOCOL, line)}: {name}: {ban.word!r} here is {ban.instead}"
        for name, line in protocol_names()
        for ban in banned_in(name)
    ]
    assert not found, "\n".join(found)


def test_metrics_are_named_in_the_vocabulary_and_end_in_a_unit() -> None:
    assert metric_names(), "the declarations were not found"
    found = [name for name in sorted(metric_names()) if banned_in(name)]
    found += [
        f"{name}: ends in no unit of {sorted(METRIC_UNITS)}"
        for name in sorted(metric_names())
        if parts_of(name)[-1] not in METRIC_UNITS
    ]
    assert not found, "\n".join(found)


def test_every_banned_word_stands_beside_a_definition() -> None:
    """The list is a selection from the definitions; it adds no words of its own."""
    assert bans(), "the table was not found"
    defined = " ".join(cells[-1] for header in ("word", "down, up") for cells in table_rows(header))
    words = {word for phrase in re.split(r"[,\s]+", defined) for word in [phrase.strip()]}
    assert not [ban.word for ban in bans() if ban.word not in words]


def test_no_word_is_defined_twice() -> None:
    words = [word for cells in table_rows("word") for word in re.findall(r"[\w ]+", cells[0])]
    words = [word.strip() for word in words if word.strip()]
    assert len(words) > 30
    assert len(words) == len(set(words))


@pytest.mark.parametrize(
    ("name", "folder", "is_banned"),
    [
        ("BlockChunk", "core/index.py", True),
        ("chunk_bytes", "core/index.py", True),
        ("CHUNKS", "core/index.py", True),
        ("chunk_bytes", "engine/scheduler.py", False),
        ("engineered", "engine", False),
        ("prefetch_count", "core/index.py", False),
        ("fetch_count", "core/index.py", True),
        ("HTTPBackend", "server/admin.py", True),
        ("saved_count", "core/index.py", False),
    ],
)
def test_a_word_is_a_part_of_a_name(name: str, folder: str, is_banned: bool) -> None:
    assert bool(banned_in(name, folder)) is is_banned
