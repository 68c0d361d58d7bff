"""Transfers of the fake shell: whoever tests says when bytes move, and how each transfer ends.

Bytes may move at any moment between the instruction and the answer, so both ends must stay as they
are until then: that is looked at when they move, and whenever slots are given to somebody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.events import TransferOutcome
from kvtier.types import TierName
from tests.support.fake_disk import FakeDisk, Stamp, checksum_of

if TYPE_CHECKING:
    from tests.support.world import World

TORN: Stamp = (b"torn",)


@dataclass(eq=False)
class Transfer:
    """A batch under way. `outcomes` are those of the blocks that have moved already."""

    asked: ins.Demote | ins.Promote
    sources: list[Stamp]  # What stood there when it began …
    checksums: list[int]  # … and what the table said.
    outcomes: list[TransferOutcome | None]

    @property
    def is_demotion(self) -> bool:
        return isinstance(self.asked, ins.Demote)


class FakeMover:
    """What is under way between the slots of a world and one of its disks."""

    def __init__(self, world: World, tier: TierName, disk: FakeDisk) -> None:
        self._world = world
        self._tier = tier
        self._disk = disk
        self.under_way: list[Transfer] = []

    def begin(self, asked: ins.Demote | ins.Promote) -> None:
        world, disk = self._world, self._disk
        record = world.namespaces[asked.namespace]
        slots, lower_slots = asked.slots.tolist(), asked.lower_slots.tolist()
        assert 0 < len(set(slots)) == len(slots) == len(set(lower_slots)) == len(lower_slots)
        if isinstance(asked, ins.Demote):
            for slot in lower_slots:
                disk.begin_write(slot, record.fingerprint)
            sources = [world.stamp(asked.namespace, slot) for slot in slots]
            checksums = [world.checksum_at[slot] for slot in slots]
        else:
            sources = [disk.read(slot) for slot in lower_slots]
            checksums = [disk.rows[slot].checksum for slot in lower_slots]
        self.assert_idle(slots)
        world.assert_idle(slots, is_source=isinstance(asked, ins.Demote))
        for one in self.under_way:
            both = set(one.asked.lower_slots.tolist()) & set(lower_slots)
            is_reading = isinstance(one.asked, ins.Promote) and isinstance(asked, ins.Promote)
            assert not both or is_reading, (
                f"{self._tier} slots {both} are read while they are written"
            )
        self.under_way.append(Transfer(asked, sources, checksums, [None] * len(slots)))

    def move(self, one: Transfer, member: int) -> None:
        """The bytes of one block move now, unless they have."""
        if one.outcomes[member] is not None:
            return
        world, disk, asked = self._world, self._disk, one.asked
        slot, lower_slot = int(asked.slots[member]), int(asked.lower_slots[member])
        expected = one.checksums[member]
        if isinstance(asked, ins.Demote):
            stamp = world.stamp(asked.namespace, slot)
            assert stamp == one.sources[member] or slot in world.scribbled, "its source was reused"
            is_right = checksum_of(stamp) == expected
            if is_right:
                disk.write(lower_slot, stamp)
        else:
            stamp = disk.read(lower_slot)
            assert stamp == one.sources[member] or lower_slot in disk.scribbled, "reused meanwhile"
            self._fill(asked, slot, stamp)
            is_right = checksum_of(stamp) == expected
        disk.block_counts["demote" if one.is_demotion else "promote"] += is_right
        one.outcomes[member] = TransferOutcome.DONE if is_right else TransferOutcome.CORRUPT

    def finish(self, one: Transfer, outcome: TransferOutcome = TransferOutcome.DONE) -> None:
        """The transfer has returned; blocks that have not moved end so."""
        for member, moved in enumerate(one.outcomes):
            if moved is None and outcome is TransferOutcome.DONE:
                self.move(one, member)
            elif moved is None:
                self._spoil(one, member, outcome)
                one.outcomes[member] = outcome
        self.under_way.remove(one)
        kind = ev.Demoted if one.is_demotion else ev.Promoted
        self._world.run_quietly(
            kind(
                namespace=one.asked.namespace,
                slots=one.asked.slots,
                lower_slots=one.asked.lower_slots,
                outcomes=np.array(one.outcomes, dtype=np.uint8),
                checksums=np.array(one.checksums, dtype=np.uint64),
                tier=self._tier,
            )
        )

    def finish_all(self) -> None:
        """Transfers that begin because others have ended as well."""
        for _ in range(100_000):
            if not self.under_way:
                return
            self.finish(self.under_way[0])
            self._world.finish_turns()
        raise AssertionError("transfers begin for ever")

    def cut_power(self) -> None:
        """Every write that was under way has arrived in part."""
        for one in self.under_way:
            for member, slot in enumerate(one.asked.lower_slots.tolist()):
                if one.is_demotion and one.outcomes[member] is None:
                    self._disk.write(slot, TORN)
        self.under_way.clear()

    def assert_idle(self, slots: Sequence[int], *, is_source: bool = False) -> None:
        """DRAM slots that somebody else is given now: nothing moves from or to them. They may be
        the source of several demotions, each to another tier."""
        for one in self.under_way:
            if is_source and one.is_demotion:
                continue
            both = set(one.asked.slots.tolist()) & set(slots)
            assert not both, f"{both} are given away while bytes move there"

    def assert_unused(self, segments: set[int]) -> None:
        """Segments that get a new life: nothing moves there."""
        for one in self.under_way:
            used = {slot // self._disk.row_count_max for slot in one.asked.lower_slots.tolist()}
            assert segments.isdisjoint(used), f"{segments & used} reused while bytes move there"

    def _fill(self, asked: ins.Promote, slot: int, stamp: Stamp) -> None:
        shard_count = self._world.namespaces[asked.namespace].shard_count
        for shard in range(shard_count):
            self._world.write(slot, shard, stamp[shard] if shard < len(stamp) else b"?")

    def _spoil(self, one: Transfer, member: int, outcome: TransferOutcome) -> None:
        """What a transfer that goes wrong leaves in its destination."""
        if outcome is TransferOutcome.REFUSED:
            return
        if one.is_demotion:
            if outcome is TransferOutcome.FAILED:
                self._disk.write(int(one.asked.lower_slots[member]), TORN)
            else:  # Something wrote to the slot in memory after its checksum was computed.
                self._world.scribble(int(one.asked.slots[member]))
        else:
            assert isinstance(one.asked, ins.Promote)
            self._fill(one.asked, int(one.asked.slots[member]), TORN)
