"""Every relative link of a document leads to a file, and its anchor to a heading there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tidy.sources import ROOT, lines_of, place, repository_files

LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
DEFINITION = re.compile(r"^\[[^\]]+\]:\s*(\S+)")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)  # https:, mailto:
FENCE = re.compile(r"^\s*(```|~~~)")
CODE = re.compile(r"`[^`]*`")


def prose_of(lines: tuple[str, ...]) -> list[tuple[int, str]]:
    """(number, line) of what is outside of code blocks."""
    found: list[tuple[int, str]] = []
    is_code = False
    for number, line in enumerate(lines, start=1):
        if FENCE.match(line):
            is_code = not is_code
        elif not is_code:
            found.append((number, line))
    return found


def links_of(lines: tuple[str, ...]) -> list[tuple[int, str]]:
    """(number, target) of every link within the repository."""
    found: list[tuple[int, str]] = []
    for number, line in prose_of(lines):
        # Code in a link's text is part of the link; a link in code is none.
        bare = CODE.sub("code", line)
        targets = LINK.findall(bare) + DEFINITION.findall(bare)
        found.extend((number, target) for target in targets if not ELSEWHERE.match(target))
    return found


def anchors_of(lines: tuple[str, ...]) -> set[str]:
    """The anchors that headings get, as code hosts make them."""
    anchors: set[str] = set()
    for _, line in prose_of(lines):
        title = re.match(r"#{1,6}\s+(.*)", line)
        if title is None:
            continue
        anchor = re.sub(r"[^\w\- ]", "", title[1].strip().lower()).replace(" ", "-")
        count = 0
        while (numbered := f"{anchor}-{count}" if count else anchor) in anchors:
            count += 1
        anchors.add(numbered)
    return anchors


def fault_of(document: Path, target: str, known: frozenset[Path]) -> str | None:
    """Why the link leads nowhere, or None. `known`: the repository's files and folders."""
    name, _, anchor = target.partition("#")
    aim = (document.parent / name).resolve() if name else document
    if aim not in known:
        return f"{target}: no such file in the repository"
    if anchor and (aim.suffix != ".md" or anchor not in anchors_of(lines_of(aim))):
        return f"{target}: no such heading"
    return None


def known_places() -> frozenset[Path]:
    files = repository_files()
    return frozenset(files).union(*(path.parents for path in files))


def test_every_relative_link_leads_somewhere() -> None:
    known = known_places()
    documents = [path for path in repository_files() if path.suffix == ".md"]
    found = [
        f"{place(path, number)}: {fault}"
        for path in documents
        for number, target in links_of(lines_of(path))
        if (fault := fault_of(path, target, known))
    ]
    assert not found, "\n".join(found)
    assert len(links_of(lines_of(ROOT / "README.md"))) > 5, "the links are not seen"


@pytest.mark.parametrize(
    "target", ["docs/none.md", "docs/style.md#no-such", "#nowhere", "../x.md", "LICENSE#part"]
)
def test_a_link_to_nowhere_is_seen(target: str) -> None:
    assert fault_of(ROOT / "README.md", target, known_places())


@pytest.mark.parametrize("target", ["docs/style.md#ten-rules", "docs/decisions/", "#use-it"])
def test_a_good_link_is_let_through(target: str) -> None:
    assert fault_of(ROOT / "README.md", target, known_places()) is None


def test_code_holds_no_links() -> None:
    lines = (
        "see [a](x.md) and `b[i](y.md)`",
        "```",
        "[c](z.md)",
        "```",
        "[`d`](v.md)",
        "[e]: w.md",
    )
    assert links_of(lines) == [(1, "x.md"), (5, "v.md"), (6, "w.md")]


def test_a_heading_twice_gets_a_number() -> None:
    lines = ("# Add a tier: `how`", "## Use", "```", "# no heading", "```", "## Use")
    assert anchors_of(lines) == {"add-a-tier-how", "use", "use-1"}
