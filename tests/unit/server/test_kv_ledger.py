"""What was announced where: a block leaves a medium when it is in none of its tiers."""

from __future__ import annotations

from kvtier.server.kv_ledger import PART_COUNT, Ledger
from kvtier.server.kv_wire import CPU, LOCAL, REMOTE, STORAGE, WirePlace
from kvtier.types import TierName

BLOCKS = [bytes([number]) * 16 for number in range(4)]


def by_place(ledger: Ledger) -> dict[WirePlace, set[bytes]]:
    found: dict[WirePlace, set[bytes]] = {}
    for number in range(PART_COUNT):
        for place, blocks in ledger.blocks(number):
            found.setdefault(place, set()).update(blocks)
    return found


def test_block_that_left_memory_for_cxl_is_still_in_the_place() -> None:
    ledger = Ledger()
    ledger.note_stored(BLOCKS, TierName.DRAM)
    ledger.note_stored(BLOCKS[:1], TierName.CXL)
    assert ledger.note_removed(BLOCKS[:2], TierName.DRAM) == BLOCKS[1:2]
    assert ledger.note_removed(BLOCKS[:1], TierName.CXL) == BLOCKS[:1]
    assert by_place(ledger) == {WirePlace(CPU, LOCAL): set(BLOCKS[2:])}


def test_disk_and_remote_engine_are_two_places() -> None:
    ledger = Ledger()
    ledger.note_stored(BLOCKS, TierName.NVME)
    ledger.note_stored(BLOCKS[2:], TierName.REMOTE)
    assert ledger.note_removed(BLOCKS, TierName.NVME) == BLOCKS
    assert by_place(ledger) == {WirePlace(STORAGE, REMOTE): set(BLOCKS[2:])}
    assert len(ledger) == 2


def test_what_was_never_announced_is_not_announced_to_be_gone() -> None:
    ledger = Ledger()
    assert ledger.note_removed(BLOCKS, TierName.DRAM) == []
    ledger.note_stored(BLOCKS[:1], TierName.DRAM)
    assert ledger.note_removed(BLOCKS, TierName.NVME) == []
    assert len(ledger) == 1


def test_taking_the_parts_forgets_everything() -> None:
    ledger = Ledger()
    ledger.note_stored(BLOCKS, TierName.DRAM)
    assert sum(map(len, ledger.take_parts())) == len(BLOCKS)
    assert by_place(ledger) == {}
