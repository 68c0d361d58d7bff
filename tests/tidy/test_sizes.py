"""Sizes that a reader can hold in mind; raising a limit is its own change, with a reason."""

from __future__ import annotations

import ast

from tests.tidy.sources import ROOT, lines_of, place, python_files, tree_of

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 6
DECISION_LINES_MAX = 60
ENGINE_LINES_MAX = 2650  # An evening's reading; docs/engine.md says what is counted.

# "kvtier/core/index.py" or "kvtier/core/index.py:PrefixIndex.match" -> why it may be larger.
EXEMPT: dict[str, str] = {}

FOLDERS = ("kvtier", "tests", "scripts", "benchmarks", "examples")


def functions(
    node: ast.AST, prefix: str = ""
) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(qualified name, node) of every function, nested ones too."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((prefix + child.name, child))
            found.extend(functions(child, f"{prefix}{child.name}."))
        elif isinstance(child, ast.ClassDef):
            found.extend(functions(child, f"{prefix}{child.name}."))
        else:
            found.extend(functions(child, prefix))
    return found


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters that a caller must think of.

    Left out: self and cls, and what is keyword-only and has a default. The latter cannot be
    confused and need not be known.
    """
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    if named and named[0].arg in ("self", "cls"):
        named = named[1:]
    required = [default for default in arguments.kw_defaults if default is None]
    return len(named) + len(required)


def function_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def test_files_are_short() -> None:
    found = [
        f"{name}: {len(lines_of(path))} lines, at most {FILE_LINES_MAX}"
        for path in python_files(*FOLDERS)
        if len(lines_of(path)) > FILE_LINES_MAX
        and (name := str(path.relative_to(ROOT))) not in EXEMPT
    ]
    assert not found, "\n".join(found)


def test_functions_are_short_and_have_few_parameters() -> None:
    found = []
    for path in python_files(*FOLDERS):
        for name, function in functions(tree_of(path)):
            if f"{path.relative_to(ROOT)}:{name}" in EXEMPT:
                continue
            if (lines := function_lines(function)) > FUNCTION_LINES_MAX:
                found.append(f"{place(path, function.lineno)}: {name} has {lines} lines")
            if (count := parameter_count(function)) > PARAMETERS_MAX:
                found.append(f"{place(path, function.lineno)}: {name} has {count} parameters")
    assert not found, "\n".join(found)


def test_the_engine_is_read_in_an_evening() -> None:
    """What lies in the folder itself; docs/engine.md says so."""
    count = sum(len(lines_of(path)) for path in (ROOT / "kvtier" / "engine").glob("*.py"))
    assert count <= ENGINE_LINES_MAX, f"{count} lines, at most {ENGINE_LINES_MAX}"


def test_decisions_are_short() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {count} lines, at most {DECISION_LINES_MAX}"
        for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > DECISION_LINES_MAX
    ]
    assert not found, "\n".join(found)


def test_every_exemption_names_something_and_says_why() -> None:
    known = {str(path.relative_to(ROOT)) for path in python_files(*FOLDERS)}
    for path in python_files(*FOLDERS):
        known.update(f"{path.relative_to(ROOT)}:{name}" for name, _ in functions(tree_of(path)))
    assert not [name for name, reason in EXEMPT.items() if name not in known or not reason.strip()]


def test_parameters_are_counted_as_a_caller_sees_them() -> None:
    source = "class C:\n  def f(self, a, /, b, *more, c, d=1, **rest): ..."
    [(name, function)] = functions(ast.parse(source))
    assert name == "C.f"
    assert parameter_count(function) == 3


def test_lines_of_a_function_run_from_def_to_its_last_line() -> None:
    source = "@decorator\ndef f():\n" + "    pass\n" * 60
    [(_, function)] = functions(ast.parse(source))
    assert function_lines(function) == FUNCTION_LINES_MAX + 1
