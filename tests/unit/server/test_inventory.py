"""The inventory is the old or the new one, wherever its writer died; what is foreign is told."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvtier.server import inventory as module
from kvtier.server.inventory import HALF_BYTES, Inventory, InventoryFile, ParkedSet, read_inventory

SET = ParkedSet("00" * 16, ("slab-1", "slab-2"), 32, 16, 4096, 4000)
OLD = Inventory(generation=7, table_version=1, slot_next=48, sets=(SET,))
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


def test_an_empty_one_is_told(file: InventoryFile) -> None:
    assert read_inventory(file.fd) == "the inventory is torn, or none"


def test_a_version_that_is_not_known_is_told(
    file: InventoryFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VERSION", 9)
    file.write(OLD)
    monkeypatch.undo()
    assert read_inventory(file.fd) == "the inventory has version 9, this daemon reads version 1"
