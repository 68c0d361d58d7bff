"""Another build of kvtier: a copy of the package with another version of the slot table.

Two fields of an entry have changed places there, and it knows how to read tables of this build.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import kvtier
from kvtier.pools.slot_table import FORMAT_VERSION

NEXT_VERSION = FORMAT_VERSION + 1
_CONVERTER = """
def _swapped(entries: Entries) -> Entries:
    entries["sequence"], entries["payload_bytes"] = (
        entries["payload_bytes"].copy(),
        entries["sequence"].copy(),
    )
    return entries


CONVERTERS: Mapping[int, Converter] = {FORMAT_VERSION - 1: _swapped}
"""
_CHANGES = {
    "pools/slot_table.py": {
        f"FORMAT_VERSION = {FORMAT_VERSION}\n": f"FORMAT_VERSION = {NEXT_VERSION}\n",
        '        ("sequence", "<u8"),\n        ("payload_bytes", "<u8"),\n': (
            '        ("payload_bytes", "<u8"),\n        ("sequence", "<u8"),\n'
        ),
        "SEQUENCE_WORD, PAYLOAD_WORD, CHECKSUM_WORD = 2, 12, 13, 14\n": (
            "SEQUENCE_WORD, PAYLOAD_WORD, CHECKSUM_WORD = 2, 13, 12, 14\n"
        ),
    },
    "pools/table_versions.py": {"\nCONVERTERS: Mapping[int, Converter] = {}\n": _CONVERTER},
}


def make_next_build(folder: Path) -> list[str]:
    """What starts `kvtier serve` of the next build, copied into `folder`."""
    copy = folder / "kvtier"
    shutil.copytree(
        Path(kvtier.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, changes in _CHANGES.items():
        text = (copy / name).read_text()
        for before, after in changes.items():
            assert text.count(before) == 1, f"{name} has changed: {before!r}"
            text = text.replace(before, after)
        (copy / name).write_text(text)
    start = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); "
        "from kvtier.pools.slot_table import FORMAT_VERSION; "
        f"assert FORMAT_VERSION == {NEXT_VERSION}; "
        "from kvtier.cli.main import main; sys.exit(main())"
    )
    return [sys.executable, "-c", start, "serve"]
