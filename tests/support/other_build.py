"""Other builds of kvtier: copies of the package with later versions of the slot table.

Two fields of an entry change places from each version to the next one, and each build knows how to
read the tables of those before it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import kvtier
from kvtier.pools.slot_table import FORMAT_VERSION

NEXT_VERSION = FORMAT_VERSION + 1
_CONVERTERS = """
def _swapped(entries: Entries) -> Entries:
    entries["sequence"], entries["payload_bytes"] = (
        entries["payload_bytes"].copy(),
        entries["sequence"].copy(),
    )
    return entries


CONVERTERS: Mapping[int, Converter] = dict.fromkeys(range(FIRST, FORMAT_VERSION), _swapped)
"""
_SWAPPED = {
    '        ("sequence", "<u8"),\n        ("payload_bytes", "<u8"),\n': (
        '        ("payload_bytes", "<u8"),\n        ("sequence", "<u8"),\n'
    ),
    "SEQUENCE_WORD, PAYLOAD_WORD, CHECKSUM_WORD = 2, 12, 13, 14\n": (
        "SEQUENCE_WORD, PAYLOAD_WORD, CHECKSUM_WORD = 2, 13, 12, 14\n"
    ),
}


def _changes(version: int) -> dict[str, dict[str, str]]:
    numbered = {f"FORMAT_VERSION = {FORMAT_VERSION}\n": f"FORMAT_VERSION = {version}\n"}
    converters = _CONVERTERS.replace("FIRST", str(FORMAT_VERSION))
    return {
        "pools/slot_table.py": numbered | (_SWAPPED if (version - FORMAT_VERSION) % 2 else {}),
        "pools/table_versions.py": {
            "\nCONVERTERS: Mapping[int, Converter] = {}\n": converters,
        },
    }


def make_next_build(folder: Path, version: int = NEXT_VERSION) -> list[str]:
    """What starts `kvtier serve` of the build with this version, copied into `folder`."""
    assert version >= NEXT_VERSION, "that is this build"
    copy = folder / "kvtier"
    shutil.copytree(
        Path(kvtier.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, changes in _changes(version).items():
        text = (copy / name).read_text()
        for before, after in changes.items():
            assert text.count(before) == 1, f"{name} has changed: {before!r}"
            text = text.replace(before, after)
        (copy / name).write_text(text)
    start = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); "
        "from kvtier.pools.slot_table import FORMAT_VERSION; "
        f"assert FORMAT_VERSION == {version}; "
        "from kvtier.cli.main import main; sys.exit(main())"
    )
    return [sys.executable, "-c", start, "serve"]
