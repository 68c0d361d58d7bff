"""The fake shell's side of the NVMe tier: opens the pool, hands over what it held."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core import lower_tier
from kvtier.types import BlockHash, NamespaceId, PackedHashes
from tests.support.fake_disk import FakeDisk, Found
from tests.support.fake_mover import FakeMover

if TYPE_CHECKING:
    from tests.support.world import World


class NvmeShell:
    """Belongs to a world; `disk` outlives it."""

    def __init__(self, world: World, disk: FakeDisk) -> None:
        self._world = world
        self.disk = disk
        self.mover = FakeMover(world, disk)
        self._found: dict[bytes, Found] = {}  # Recovered, of namespaces that are not open.

    def open(self) -> None:
        """The pool is read now, and told of."""
        disk = self.disk
        lives, found = disk.recover(self._epochs())
        self._found = {one.fingerprint: one for one in found}
        self._world.run_quietly(
            ev.LowerOpened(
                segment_bytes=disk.segment_bytes,
                segment_count=disk.segment_count,
                row_count_max=disk.row_count_max,
                lane_count=disk.lane_count,
                sequence_first=disk.sequence_first,
                lives=lives,
            )
        )
        for namespace, record in self._world.namespaces.items():
            if record.is_open:
                self.hand_over(namespace)

    def hand_over(self, namespace: NamespaceId) -> None:
        """What the pool held of a namespace that is open."""
        found = self._found.pop(self._world.namespaces[namespace].fingerprint, None)
        if found is not None:
            self._world.run_quietly(
                ev.BlocksRecovered(
                    namespace,
                    found.epoch,
                    b"".join(found.hashes),
                    found.parents,
                    found.slots,
                    found.sequences,
                )
            )

    def worsen(self, *, readable: bool) -> None:
        """Writes to the pool do not work any more, or nothing does."""
        self.disk.readable = self.disk.readable and readable
        self._world.run_quietly(ev.LowerChanged(readable))

    def cut_power(self, keeps: Callable[[int], bool]) -> None:
        self.mover.cut_power()
        self.disk.cut_power(keeps)

    # ----------------------------------------------------------------------------- instructions

    def note(self, done: ins.BindSegments | ins.WriteLowerReady | ins.WriteLowerGone) -> None:
        match done:
            case ins.BindSegments():
                self.mover.assert_unused({header.segment for header in done.headers})
                self.disk.bind(done.headers)
            case ins.WriteLowerReady():
                record = self._world.namespaces[done.namespace]
                assert done.epoch == record.epoch, "a block of an older epoch became READY"
                assert record.ever_ready.issuperset(done.hashes), "demoted, and never committed"
                self.disk.write_ready(done, record.fingerprint)
            case ins.WriteLowerGone():
                self.disk.write_gone(done.lower_slots.tolist())

    # --------------------------------------------------------------------------------- checking

    def to_be_taken_in(self, event: ev.BlocksRecovered) -> set[BlockHash]:
        """Blocks of this slice that must be resident on NVMe after it."""
        record, disk = self._world.namespaces[event.namespace], self.disk
        taken_in: set[BlockHash] = set()
        if event.epoch != record.epoch or not disk.readable:
            return taken_in
        hashes = PackedHashes(event.packed, len(event.packed) // len(event.lower_slots))
        stop = event.done_count + lower_tier.RECOVERED_SLICE_BLOCKS
        for one in range(event.done_count, min(stop, len(hashes))):
            slot, parent = int(event.lower_slots[one]), int(event.parents[one])
            row = disk.rows.get(slot)
            life = disk.headers[slot // disk.row_count_max].sequence
            is_there = row is not None and row.block == hashes[one] and life == event.sequences[one]
            follows = parent == -1 or hashes[parent] in record.stored | taken_in
            if is_there and follows and hashes[one] not in record.on_nvme:
                taken_in.add(hashes[one])
        return taken_in

    def check(self) -> None:
        """The core and the slot table agree on how many blocks there are."""
        nvme = self._world.manager.stats().nvme
        assert nvme is not None
        assert nvme.block_count == self.disk.block_count(self._epochs()), "not as in its table"

    def assert_all_free(self) -> None:
        """Every block of an open namespace is void: only segments that are being filled are left,
        and what belongs to namespaces that nobody has opened."""
        nvme, disk = self._world.manager.stats().nvme, self.disk
        assert nvme is not None
        is_open = {one.fingerprint for one in self._world.namespaces.values() if one.is_open}
        left = {
            slot // disk.row_count_max
            for slot, row in disk.rows.items()
            if row.fingerprint not in is_open
        }
        filling_count = len(is_open) * disk.lane_count
        assert nvme.demoting_count == nvme.promoting_count == 0, nvme
        assert nvme.free_segment_count >= disk.segment_count - len(left) - filling_count, nvme

    def _epochs(self) -> dict[bytes, int]:
        return {one.fingerprint: one.epoch for one in self._world.namespaces.values()}
