"""Sizes on the command line: plain numbers of bytes, or with KiB, MiB, GiB, TiB."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"(\d+) ?(kib|mib|gib|tib|)", re.IGNORECASE)


def size(text: str) -> int:
    """For argparse: "2MiB" -> 2097152."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write bytes, or such as 2MiB")
    return int(found[1]) * _UNITS[found[2].lower()]


def positive(text: str) -> int:
    """For argparse: a count."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no count: write a number above 0")
    return int(text)
