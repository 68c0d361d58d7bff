"""docs/vllm.md tells of every option and metric of the connector, and of no other.

The adapter imports vLLM, which is not here: its options are loaded from their file alone, and the
metrics read from the source.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from kvtier.connector.settings import ConnectorSettings
from tests.tidy.sources import PACKAGE, ROOT, tree_of

TEXT = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
ADAPTER = PACKAGE / "connector" / "vllm"
ROW = re.compile(r"^\| `(?P<name>(kvtier\.|vllm:kvtier_)\w+)` \|(?P<rest>.*)\|$")


@dataclass(frozen=True)
class Told:
    name: str
    cells: tuple[str, ...]


def rows_of(text: str, prefix: str) -> list[Told]:
    """The table rows whose first cell is such a name."""
    found = []
    for line in text.splitlines():
        row = ROW.match(line)
        if row is not None and row["name"].startswith(prefix):
            cells = tuple(cell.strip() for cell in row["rest"].split(" | "))
            found.append(Told(row["name"].removeprefix(prefix), cells))
    return found


@pytest.fixture(scope="module")
def options() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("options_alone", ADAPTER / "options.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def defaults_of(options: ModuleType) -> dict[str, Any]:
    texts = dict.fromkeys(options._TEXTS, "")
    return texts | {name: getattr(ConnectorSettings(), name) for name in options._SETTINGS}


def test_every_option_is_told_once_with_its_default(options: ModuleType) -> None:
    told = rows_of(TEXT, "kvtier.")
    names = [row.name for row in told]
    assert len(names) == len(set(names)), "an option stands in two rows"
    assert {row.name: json.loads(row.cells[0].strip("`")) for row in told} == defaults_of(options)


def test_every_option_that_the_text_names_exists(options: ModuleType) -> None:
    known = {*options._TEXTS, *options._SETTINGS, "NAME"}
    assert set(re.findall(r"`kvtier\.(\w+)", TEXT)) <= known


def metrics() -> dict[str, tuple[str, str]]:
    """Kind and label of each, by name, from the calls of `Metric(...)`."""
    found = {}
    for node in ast.walk(tree_of(ADAPTER / "metrics.py")):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Metric":
            words = [ast.literal_eval(word) for word in node.args]
            named = {word.arg: ast.literal_eval(word.value) for word in node.keywords}
            label = named.get("label") or (words[2] if len(words) > 2 else "")
            kind = "histogram" if named.get("is_histogram") else "counter"
            found[words[0]] = (kind, label)
    return found


def test_every_metric_is_told_once_with_its_kind_and_label() -> None:
    told = rows_of(TEXT, "vllm:kvtier_")
    assert len(told) == len({row.name for row in told})
    assert {row.name: (row.cells[0], row.cells[1].strip("`–")) for row in told} == metrics()
    assert all(len(row.cells) == 3 and row.cells[2] for row in told), "a meaning is missing"


def test_every_reason_of_a_miss_is_told() -> None:
    reasons = set(re.findall(r'"(\w+)"', source_between("def note_miss", "def note_allocated")))
    [row] = [row for row in rows_of(TEXT, "vllm:kvtier_") if row.name == "missed_requests"]
    assert {"absent", "deadline"} <= reasons
    assert reasons - {"missed_requests"} <= set(re.findall(r"`(\w+)`", row.cells[2]))


def source_between(first: str, last: str) -> str:
    source = (ADAPTER / "measuring.py").read_text(encoding="utf-8")
    return source[source.index(first) : source.index(last)]


def test_the_state_on_gpus_is_said_alike_in_both_documents() -> None:
    sentence = "vLLM on a GPU: not run by us"
    assert sentence in TEXT
    assert sentence in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text", ["| `kvtier.x` | 1 | m |", '| `kvtier.x` | `""` | has `a | b` in it |']
)
def test_rows_are_found(text: str) -> None:
    [row] = rows_of(f"words\n{text}\n", "kvtier.")
    assert row.name == "x"
    assert json.loads(row.cells[0].strip("`")) in (1, "")
