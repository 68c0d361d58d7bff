"""What a command prints: JSON alone on standard output, everything for people elsewhere."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence

from google.protobuf.message import Message


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="JSON alone on standard output, messages on stderr"
    )


def print_json(value: object, *, compact: bool = False) -> None:
    """One document; `compact` puts it on one line, for a stream of them."""
    text = json.dumps(value, indent=None if compact else 2, ensure_ascii=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A message for people, such as progress."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as they need; numbers to the right."""
    cells = [[str(value) for value in row] for row in rows]
    widths = [
        max(len(line[column]) for line in [list(headings), *cells])
        for column in range(len(headings))
    ]
    lines = []
    for line in [list(headings), *cells]:
        padded = [
            cell.rjust(width) if _is_number(cell) else cell.ljust(width)
            for cell, width in zip(line, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def bytes_text(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def plain(message: Message) -> dict[str, object]:
    """A message as JSON values: every field, 64-bit numbers as numbers, bytes as hex."""
    found: dict[str, object] = {}
    for field in message.DESCRIPTOR.fields:
        kind = field.message_type
        is_map = kind is not None and kind.GetOptions().map_entry
        value = getattr(message, field.name)
        found[field.name] = dict(value) if is_map else _plain_value(value)
    return found


def _plain_value(value: object) -> object:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str | int | float):
        return value
    assert isinstance(value, Iterable), "a field is plain, a message or repeated"
    return [_plain_value(one) for one in value]


def _is_number(text: str) -> bool:
    head = text.partition(" ")[0].rstrip("%")
    return head.replace(",", "").replace(".", "", 1).replace("-", "", 1).isdigit()
