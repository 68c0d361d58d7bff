"""Nothing in the repository belongs to one machine, and nothing on a wire is run as code."""

from __future__ import annotations

import ast
import re

import pytest

from tests.tidy.sources import (
    ROOT,
    imported_modules,
    lines_of,
    place,
    python_files,
    repository_files,
    tree_of,
)

# Put together here so that this file does not hold them itself.
MACHINE_WORDS = tuple(
    re.compile(first + second)
    for first, second in [
        (r"(?<![\w.])/wo", r"rk/"),
        (r"(?<![\w.])/ro", r"ot/"),
        (r"/home/", r"(?!\$|<|USER|user\b)\w"),
        ("pypi", r"\.org"),
        ("pythonhos", r"ted\.org"),
        ("download\\.pytor", r"ch\.org"),
        ("deb\\.deb", r"ian\.org"),
        ("npmjs", r"\.(org|com)"),
    ]
)
RUNS_DATA = ("pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve")
TODO = re.compile(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))")


def text_lines() -> list[tuple[str, str]]:
    """(place, line) of every text file of the repository but the licence."""
    found: list[tuple[str, str]] = []
    for path in repository_files():
        if path.name == "LICENSE":
            continue
        try:
            lines = lines_of(path)
        except UnicodeDecodeError:
            continue  # Not text.
        found.extend((place(path, number), line) for number, line in enumerate(lines, start=1))
    return found


def machine_words_in(line: str) -> bool:
    return any(word.search(line) for word in MACHINE_WORDS)


def is_todo_without_issue(line: str) -> bool:
    return bool(TODO.search(line))


def code_from_data(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, name) of whatever turns data into running code."""
    found = [
        (line, name) for name, line in imported_modules(tree) if name.partition(".")[0] in RUNS_DATA
    ]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            found.append((node.lineno, node.func.id))
        found.extend(
            (node.lineno, "allow_pickle")
            for keyword in node.keywords
            if keyword.arg == "allow_pickle" and not is_false(keyword.value)
        )
    return found


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_no_path_or_host_of_one_machine() -> None:
    found = [f"{where}: {line.strip()}" for where, line in text_lines() if machine_words_in(line)]
    assert not found, "\n".join(found)


def test_every_todo_carries_an_issue_number() -> None:
    here = str((ROOT / "tests" / "tidy").relative_to(ROOT))
    documents = ("docs/style.md", "CONTRIBUTING.md")  # They explain the rule.
    found = [
        f"{where}: {line.strip()}"
        for where, line in text_lines()
        if is_todo_without_issue(line) and not where.startswith((here, *documents))
    ]
    assert not found, "\n".join(found)


def test_no_data_is_run_as_code() -> None:
    found = [
        f"{place(path, line)}: {name}"
        for path in python_files("kvtier")
        for line, name in code_from_data(tree_of(path))
    ]
    assert not found, "\n".join(found)


def test_generated_and_licence_files_are_there() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in repository_files()}
    assert {"LICENSE", "kvtier/py.typed", "kvtier/v1/kvtier_pb2.py"} <= names


@pytest.mark.parametrize(
    "line",
    ["cd /wo" + "rk/main", "open('/ro" + "ot/x')", "/home/" + "alice/x", "https://pypi" + ".org/x"],
)
def test_a_machine_word_is_seen(line: str) -> None:
    assert machine_words_in(line)


@pytest.mark.parametrize("line", ["src/work/x", "/home/$USER", "framework/y", "the root/leaf"])
def test_an_innocent_line_is_let_through(line: str) -> None:
    assert not machine_words_in(line)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n  from marshal import loads",
        "eval('1')",
        "np.load(f, allow_pickle=x)",
    ],
)
def test_code_from_data_is_seen(source: str) -> None:
    assert code_from_data(ast.parse(source))


def test_evaluation_mode_of_a_model_is_no_eval() -> None:
    assert not code_from_data(ast.parse("model.eval()\nnp.load(f, allow_pickle=False)"))


def test_a_todo_needs_its_number() -> None:
    assert is_todo_without_issue("# TO" + "DO: later")
    assert not is_todo_without_issue("# TO" + "DO(#12): later")
