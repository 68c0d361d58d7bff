"""Small files of /sys and /proc: one that is missing, or says something strange, is None."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

SYSFS = Path("/sys")


def read_text(path: Path) -> str | None:
    """The file's text without white space around it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """A whole number, decimal or with 0x."""
    try:
        return int(read_text(path) or "", 0)
    except ValueError:
        return None


def names(folder: Path) -> list[str]:
    """What is in the folder, in order; nothing when there is no folder."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def numbered(folder: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """`node0`, `node2`, … of the folder by number; numbers may have gaps."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)")
    found = [
        (int(match[1]), match[0]) for name in names(folder) if (match := pattern.fullmatch(name))
    ]
    for number, name in sorted(found):
        yield number, folder / name


def parse_list(text: str) -> tuple[int, ...]:
    """The kernel's lists: "0-2,8" is 0, 1, 2, 8; what is no list is empty."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is not None:
            first = int(match[1])
            found.extend(range(first, int(match[2] or first) + 1))
    return tuple(found)


def read_fields(path: Path) -> dict[str, int]:
    """Lines such as `MemFree:  123 kB`, or `Node 1 MemFree: 123 kB`: the number by its word."""
    found: dict[str, int] = {}
    for line in (read_text(path) or "").splitlines():
        match = re.fullmatch(r"(?:Node \d+ )?([\w()]+):\s+(\d+)(?: kB)?", line.strip())
        if match is not None:
            found[match[1]] = int(match[2])
    return found
