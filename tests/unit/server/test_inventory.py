"""The inventory is the old or the new one, wherever its writer died; what is foreign is told."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

from kvtier.server import inventory as module
from kvtier.server.inventory import (
    HALF_BYTES,
    Inventory,
    InventoryFile,
    ParkedSession,
    ParkedSet,
    ParkedSlab,
    read_inventory,
)

SLABS = (ParkedSlab("slab-1", 1, "base"), ParkedSlab("slab-2", 2, "thp", 2 << 20, node=1))
SET = ParkedSet("00" * 16, SLABS, 32, 16, 4096, 4000)
SESSION = ParkedSession(3, "ab" * 16, "BOTH", (0, 1), False, 3, "LIVE", token="cd")
OLD = Inventory(generation=7, table_version=1, slot_next=48, sets=(SET,), sessions=(SESSION,))
NEW = Inventory(generation=7, table_version=1, slot_next=64)


def halves(fd: int) -> dict[int, bytes]:
    """The beginnings of both, by their offset; all that is written in these tests."""
    return {offset: os.pread(fd, 400, offset) for offset in (0, HALF_BYTES)}


@pytest.fixture
def file() -> Iterator[InventoryFile]:
    file = InventoryFile()
    yield file
    file.close()


def test_what_was_written_last_is_read(file: InventoryFile) -> None:
    for inventory in (OLD, NEW, OLD):
        file.write(inventory)
        assert read_inventory(file.fd) == inventory


def test_what_stayed_the_same_is_not_written_out_anew(
    file: InventoryFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write(OLD)
    written: list[object] = []

    def counted(one: ParkedSet | ParkedSession | Inventory) -> dict[str, object]:
        written.append(one)
        return asdict(one)

    monkeypatch.setattr(module, "asdict", counted)
    more = replace(SET, slot_first=64)
    later = replace(OLD, sets=(SET, more), slot_next=80)
    file.write(later)
    assert read_inventory(file.fd) == later
    assert [one for one in written if not isinstance(one, Inventory)] == [more]


def test_a_client_may_be_called_as_it_likes(file: InventoryFile) -> None:
    odd = replace(OLD, sessions=(replace(SESSION, client='"sets": [], "sessions": []'),))
    file.write(odd)
    assert read_inventory(file.fd) == odd


def test_a_later_life_goes_on_where_this_one_ended(file: InventoryFile) -> None:
    file.write(OLD)
    later = InventoryFile(os.dup(file.fd))
    later.write(NEW)
    assert read_inventory(file.fd) == NEW
    later.close()


def test_a_torn_writing_leaves_the_one_before(file: InventoryFile) -> None:
    file.write(NEW)
    file.write(OLD)
    before = halves(file.fd)
    file.write(NEW)
    after = halves(file.fd)
    (offset,) = [one for one in before if before[one] != after[one]]
    for cut in range(len(after[offset])):
        os.pwrite(file.fd, after[offset][:cut] + before[offset][cut:], offset)
        assert read_inventory(file.fd) in (OLD, NEW)
    os.pwrite(file.fd, after[offset], offset)
    assert read_inventory(file.fd) == NEW


def test_what_a_newer_build_has_added_is_left_aside(file: InventoryFile) -> None:
    file.write(OLD)
    text = os.pread(file.fd, 4096, HALF_BYTES)[24:].rstrip(b"\0").replace(b"{", b'{"more": [1], ')
    body = json.loads(text)
    assert body["more"] == [1]
    head = struct.pack("<4sIQI", b"KVH1", 1, 9, len(text))
    crc = struct.pack("<I", zlib.crc32(head + text))
    os.pwrite(file.fd, head + crc + text, 0)
    assert read_inventory(file.fd) == OLD


def test_an_empty_one_is_told(file: InventoryFile) -> None:
    assert read_inventory(file.fd) == "the inventory is torn, or none"


def test_a_version_that_is_not_known_is_told(
    file: InventoryFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VERSION", 9)
    file.write(OLD)
    monkeypatch.undo()
    assert read_inventory(file.fd) == "the inventory has version 9, this daemon reads version 1"
