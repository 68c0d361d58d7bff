"""Events of the log: what the daemon's code writes, what is declared, and the table for people."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kvtier.server import log_events
from kvtier.server.log_events import EVENTS
from tests.tidy.sources import ROOT, place, python_files, tree_of

LEVELS = ("debug", "info", "warning", "error", "critical")
OPERATIONS = ROOT / "docs" / "operations.md"


def log_calls() -> Iterator[tuple[str, str, str, ast.Call]]:
    """(place, level, event, call) of every line that the daemon may write; level is "log" where it
    is an argument."""
    for path in python_files("kvtier/server", "kvtier/pools", "kvtier/io", "kvtier/core"):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner, level = node.func.value, node.func.attr
            if isinstance(owner, ast.Name) and owner.id == "log" and level in (*LEVELS, "log"):
                message = node.args[1] if level == "log" else node.args[0]
                event = message.value if isinstance(message, ast.Constant) else ast.unparse(message)
                yield place(path, node.lineno), level, str(event), node


def literal_fields(call: ast.Call) -> list[str]:
    """The names in `extra={...}`; none where it is put together elsewhere."""
    for keyword in call.keywords:
        if keyword.arg == "extra" and isinstance(keyword.value, ast.Dict):
            return [str(key.value) for key in keyword.value.keys if isinstance(key, ast.Constant)]
    return []


def test_every_line_of_the_daemon_is_declared() -> None:
    calls = list(log_calls())
    assert len(calls) > 30, "the calls were not found"
    found = [
        f"{where}: {event!r} at {level} is not in kvtier/server/log_events.py"
        for where, level, event, _ in calls
        if event not in EVENTS or level not in (EVENTS[event].level, "log")
    ]
    assert not found, "\n".join(found)


def test_every_field_of_a_line_is_declared() -> None:
    found = [
        f"{where}: {event!r} has no field {name!r} in kvtier/server/log_events.py"
        for where, _, event, call in log_calls()
        for name in literal_fields(call)
        if event in EVENTS and name not in EVENTS[event].fields
    ]
    assert not found, "\n".join(found)


def test_every_event_that_is_declared_is_written_somewhere() -> None:
    written = {event for _, _, event, _ in log_calls()}
    assert set(EVENTS) - written == {"lines left out"}, "that one is put together by logs.py"


def test_the_table_of_events_is_generated_from_the_declarations() -> None:
    assert log_events.documentation() in OPERATIONS.read_text(encoding="utf-8")
