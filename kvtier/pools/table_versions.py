"""Slot tables of earlier versions: what an earlier build left in memory, as this one would have it.

Whoever raises FORMAT_VERSION adds a converter from the version before. An entry keeps its 128
bytes, and magic, version and CRC their places; the rest is the version's own. What is not right in
its own version stays as it is, and is in doubt here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from kvtier.memory import Bytes
from kvtier.pools.slot_table import (
    ENTRY,
    ENTRY_BYTES,
    FORMAT_VERSION,
    MAGIC,
    Entries,
    entry_crcs,
    right_crcs,
)

Converter = Callable[[Entries], Entries]

# From each version to the next one: right entries, read with this build's fields, to right ones.
# Version and CRC are set afterwards.
CONVERTERS: Mapping[int, Converter] = {}


def as_current(table: Bytes, version: int) -> Bytes | None:
    """The same table in this build's version; None where no way leads there."""
    while version != FORMAT_VERSION:
        convert = CONVERTERS.get(version)
        if convert is None:
            return None
        table = _converted(table, version, convert)
        version += 1
    return table


def _converted(table: Bytes, version: int, convert: Converter) -> Bytes:
    table = table[: len(table) // ENTRY_BYTES * ENTRY_BYTES].copy()
    entries = table.view(ENTRY)
    rows = np.flatnonzero((entries["magic"] == MAGIC) & (entries["version"] == version))
    rows = rows[right_crcs(entries[rows])]
    changed = convert(entries[rows])
    changed["version"] = version + 1
    changed["crc"] = entry_crcs(changed)
    entries[rows] = changed
    return table
