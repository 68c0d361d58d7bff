"""A table of an earlier version is read as one of this; what is in doubt there is so here."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.pools import table_versions as module
from kvtier.pools.recovery import recover
from kvtier.pools.slot_table import (
    ENTRY,
    FORMAT_VERSION,
    BlockFacts,
    Entries,
    SlotTable,
    entry_crcs,
)
from kvtier.pools.table_versions import as_current
from kvtier.types import BlockHash, EngineId

GENERATION, EPOCH, NAMESPACE = 5, 77, b"n" * 16
OLDER = FORMAT_VERSION - 1


def swapped(entries: Entries) -> Entries:
    """The older version has these two fields in each other's place."""
    entries["sequence"], entries["payload_bytes"] = (
        entries["payload_bytes"].copy(),
        entries["sequence"].copy(),
    )
    return entries


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Slots 0 to 3 are ready, 4 is reserved, the others empty; by the build before."""
    monkeypatch.setattr(module, "CONVERTERS", {OLDER: swapped})
    table = SlotTable(GENERATION, grow_slots=32)
    hashes = [BlockHash(bytes([number]) * 32) for number in range(4)]
    facts = BlockFacts(NAMESPACE, EPOCH, payload_bytes=100)
    table.write_ready(
        np.arange(4, dtype=np.uint32), hashes, [None, *hashes[:-1]], facts, sequence=1000
    )
    table.write_reserved(np.array([4], np.uint32), EngineId(b"e" * 16))
    found = table.read_bytes().copy()
    table.close()
    entries = found.view(ENTRY)
    used = entries[:5]
    entries[:5] = swapped(used.copy())
    entries["version"][:5] = OLDER
    entries["crc"][:5] = entry_crcs(entries[:5])
    return found


def test_right_entries_are_right_ones_of_this_version(older: np.ndarray) -> None:
    assert not len(recover(older, GENERATION, {NAMESPACE: EPOCH}).ready_slots)
    table = as_current(older, OLDER)
    assert table is not None
    found = recover(table, GENERATION, {NAMESPACE: EPOCH})
    assert found.ready_slots.tolist() == [0, 1, 2, 3]
    assert found.ready["sequence"].tolist() == [1000, 1001, 1002, 1003]
    assert set(found.ready["payload_bytes"].tolist()) == {100}
    assert found.reserved_slots.tolist() == [4]
    assert not len(found.void_slots)


def test_a_torn_entry_stays_in_doubt(older: np.ndarray) -> None:
    older[2 * 128 + 40] ^= 1
    table = as_current(older, OLDER)
    assert table is not None
    found = recover(table, GENERATION, {NAMESPACE: EPOCH})
    assert found.ready_slots.tolist() == [0, 1, 3]
    assert found.void_slots.tolist() == [2]


def test_a_table_of_this_version_is_left_alone(older: np.ndarray) -> None:
    assert as_current(older, FORMAT_VERSION) is older


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, OLDER - 1])
def test_where_no_way_leads_there_is_no_table(older: np.ndarray, version: int) -> None:
    assert as_current(older, version) is None
