"""What the tidy tests read: the files of the repository, and their syntax trees."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kvtier"
GENERATED_DIR = PACKAGE / "v1"


def python_files(*folders: str) -> list[Path]:
    """Every Python file below the folders (of the repository), generated ones left out, sorted."""
    found: list[Path] = []
    for folder in folders:
        found.extend(
            path for path in (ROOT / folder).rglob("*.py") if GENERATED_DIR not in path.parents
        )
    return sorted(found)


@cache
def repository_files() -> tuple[Path, ...]:
    """Every file that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = sorted(name for name in listed.stdout.decode().split("\0") if name)
    return tuple(path for name in names if (path := ROOT / name).is_file())


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def lines_of(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8").splitlines())


def place(path: Path, line: int) -> str:
    """`kvtier/core/index.py:12`, for a message that an editor can follow."""
    return f"{path.relative_to(ROOT)}:{line}"


def has_remark(path: Path, line: int, remark: str) -> bool:
    """Whether the line allows itself, as in `# gil-ok: 24 bytes`; the reason must be there."""
    _, mark, reason = lines_of(path)[line - 1].partition(f"# {remark}:")
    return bool(mark) and bool(reason.strip())


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(module, line) of every import, lazy ones too; `from a import b` gives a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield module, node.lineno
            for alias in node.names:
                yield f"{module}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and _is_import_call(node):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value, node.lineno


def _is_import_call(node: ast.Call) -> bool:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr == "import_module"
    return isinstance(function, ast.Name) and function.id in ("import_module", "__import__")
