"""What must not stop the daemon: the GIL held over a block, time asked for, a queue without end.

Each finding may be allowed on its own line with its reason: `# gil-ok: 16 bytes`,
`# bounded: REASON`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.tidy.sources import (
    PACKAGE,
    has_remark,
    imported_modules,
    place,
    python_files,
    tree_of,
)

BYTE_FOLDERS = ("kvtier/server", "kvtier/pools", "kvtier/io")

# Names that stand for memory in this code. Assigning to a slice of a memoryview or an mmap copies
# under the GIL; np.copyto does not.
MEMORY_NAME = re.compile(r"(^|_)(view|views|mv|mmap|mm|memory|payload|slab|slot_bytes_of)$")

# Who may ask the system for the time: the clock; and tools that measure, which no test replays.
TIME_ALLOWED = ("clock.py", "cli/", "engine/", "demo/")
# Chance is an argument: made from a seed where the daemon starts, a setting of the client (the
# jitter of its reconnects), and free in tools.
RANDOM_ALLOWED = ("server/app.py", "client/", "cli/", "engine/", "sim/")

UNBOUNDED = ("Queue", "LifoQueue", "PriorityQueue", "SimpleQueue")


def last_name(node: ast.expr) -> str:
    """`self._view` and `view` are both about `view`; a call or an index about what it is of."""
    if isinstance(node, ast.Attribute):
        return node.attr.lstrip("_")
    if isinstance(node, ast.Name):
        return node.id.lstrip("_")
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return ""


def is_memory(node: ast.expr) -> bool:
    name = last_name(node)
    return name == "memoryview" or bool(MEMORY_NAME.search(name))


def gil_holders(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, what) of every operation that may copy a block while it holds the GIL."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "tobytes":
                found.append((node.lineno, "tobytes() copies under the GIL"))
            elif last_name(node.func) in ("bytes", "bytearray") and any(
                isinstance(arg, ast.Subscript) or is_memory(arg) for arg in node.args
            ):
                found.append((node.lineno, "bytes(memory) copies under the GIL"))
        elif isinstance(node, ast.Assign):
            found.extend(
                (target.lineno, "assignment to a slice of memory copies under the GIL")
                for target in node.targets
                if isinstance(target, ast.Subscript)
                and isinstance(target.slice, ast.Slice)
                and is_memory(target.value)
            )
    return found


def unbounded_queues(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, name) of every queue made without a limit (rule 7)."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or last_name(node.func) not in UNBOUNDED:
            continue
        name = last_name(node.func)
        limits = [*node.args, *(word.value for word in node.keywords if word.arg == "maxsize")]
        if name == "SimpleQueue" or not limits or is_zero(limits[0]):
            found.append((node.lineno, name))
    return found


def is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0


def importers_of(module: str, allowed: tuple[str, ...]) -> list[str]:
    return [
        f"{place(path, line)}: imports {module}"
        for path in python_files("kvtier")
        if not below_package(path).startswith(allowed)
        for name, line in imported_modules(tree_of(path))
        if name == module
    ]


def below_package(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_the_daemon_holds_the_gil_over_no_block() -> None:
    found = [
        f"{place(path, line)}: {what}"
        for path in python_files(*BYTE_FOLDERS)
        for line, what in gil_holders(tree_of(path))
        if not has_remark(path, line, "gil-ok")
    ]
    assert not found, "\n".join(found)


def test_every_queue_has_a_limit() -> None:
    found = [
        f"{place(path, line)}: {name} without maxsize"
        for path in python_files("kvtier")
        for line, name in unbounded_queues(tree_of(path))
        if not has_remark(path, line, "bounded")
    ]
    assert not found, "\n".join(found)


def test_only_the_clock_asks_for_the_time() -> None:
    assert not (found := importers_of("time", TIME_ALLOWED)), "\n".join(found)


def test_chance_comes_from_one_seed() -> None:
    assert not (found := importers_of("random", RANDOM_ALLOWED)), "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "array.tobytes()",
        "bytes(memoryview(x))",
        "bytes(self._view)",
        "bytes(data[0:10])",
        "bytearray(slot_view)",
        "memoryview(m)[a:b] = data",
        "self._mmap[a:b] = data",
        "view[:] = data",
    ],
)
def test_a_gil_holder_is_seen(source: str) -> None:
    assert gil_holders(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["bytes(16)", "np.copyto(view, data)", "counts[0:2] = data", "view[3] = 1", "bytes(b)"],
)
def test_a_small_copy_is_let_through(source: str) -> None:
    assert not gil_holders(ast.parse(source))


@pytest.mark.parametrize(
    ("source", "is_seen"),
    [
        ("asyncio.Queue()", True),
        ("queue.Queue(0)", True),
        ("SimpleQueue()", True),
        ("asyncio.Queue(maxsize=8)", False),
        ("queue.Queue(LIMIT)", False),
    ],
)
def test_a_queue_without_limit_is_seen(source: str, is_seen: bool) -> None:
    assert bool(unbounded_queues(ast.parse(source))) is is_seen
