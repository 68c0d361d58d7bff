"""The table of known faults names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

TESTS = Path(__file__).parents[1]
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def rows() -> list[str]:
    lines = (TESTS / "vllm" / "README.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("|")][2:]


def test_every_named_test_exists() -> None:
    named = {pair for row in rows() for pair in NAMED.findall(row)}
    assert len(named) > 30
    missing = [
        f"{file}::{name}"
        for file, name in sorted(named)
        if f"def {name}(" not in (TESTS / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_every_row_names_a_test_or_says_why_not() -> None:
    reasons = ("does not apply", "was not run", "not handed on yet")
    bare = [row for row in rows() if not NAMED.search(row) and not any(r in row for r in reasons)]
    assert bare == []
