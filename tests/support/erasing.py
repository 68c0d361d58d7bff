"""What the daemon's threads overwrite for a purge, in the fake shell's memory and on its disk."""

from __future__ import annotations

from kvtier.core import instructions as ins
from tests.support.fake_disk import FakeDisk
from tests.support.fake_mover import FakeMover
from tests.support.world import World


def wipe_slots(world: World, held: ins.SlotsHeld) -> None:
    """Nothing moves from or to them meanwhile."""
    slots = held.slots.tolist()
    world.assert_idle(slots)
    for place in [place for place in world.content if place[0] in slots]:
        del world.content[place]
    record = world.namespaces[held.namespace]
    assert record.ready_at.keys().isdisjoint(slots), "a block was erased"
    record.forget_entries(slots)


def wipe_remains(mover: FakeMover, disk: FakeDisk, held: ins.RemainsHeld) -> None:
    """Whatever lies in these ranges; then the entries, and the header where nothing is in use."""
    first = held.segment * disk.row_count_max
    if held.is_whole:
        slots = list(range(first, first + disk.row_count_max))
        disk.headers.pop(held.segment, None)
        void_slots = slots
    else:
        header = disk.headers[held.segment]
        slot_bytes = header.layout.slot_bytes
        slots = [
            first + row
            for row in range(header.slot_count)
            if any(begin <= row * slot_bytes < begin + length for begin, length in held.ranges)
        ]
        void_slots = [first + row for row in held.void_rows]
    for one in mover.under_way:
        assert not set(one.asked.lower_slots.tolist()) & set(slots), "erased while bytes move there"
    for slot in void_slots:
        disk.rows.pop(slot, None)
    disk.erase(slots)
