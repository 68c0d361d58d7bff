"""The fake shell's side of a tier below memory: opens the pool, hands over what it held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core import lower_tier
from kvtier.core.stats import LowerCounts
from kvtier.types import BlockHash, NamespaceId, PackedHashes, PrefixMatch, TierName
from tests.support.fake_disk import FakeDisk, Found
from tests.support.fake_mover import FakeMover

if TYPE_CHECKING:
    from tests.support.namespace_record import NamespaceRecord
    from tests.support.world import World


class LowerShell:
    """Belongs to a world; `disk` outlives it."""

    def __init__(self, world: World, tier: TierName, disk: FakeDisk) -> None:
        self._world = world
        self.tier = tier
        self.disk = disk
        self.mover = FakeMover(world, tier, disk)
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
                tier=self.tier,
                is_direct=disk.is_direct,
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
                    tier=self.tier,
                )
            )

    def worsen(self, *, readable: bool) -> None:
        """Writes to the pool do not work any more, or nothing does."""
        self.disk.readable = self.disk.readable and readable
        self._world.run_quietly(ev.LowerChanged(readable, self.tier))

    def cut_power(self, keeps: Callable[[int], bool]) -> None:
        self.mover.cut_power()
        self.disk.cut_power(keeps)

    # ----------------------------------------------------------------------------- instructions

    def note(self, done: ins.BindSegments | ins.WriteLowerReady | ins.WriteLowerGone) -> None:
        match done:
            case ins.BindSegments():
                segments = {header.segment for header in done.headers}
                self.mover.assert_unused(segments)
                if self.disk.is_direct:
                    for watcher in self._world.bound_watchers:
                        watcher(self.disk, segments)
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
        """Blocks of this slice that must be resident in this tier after it."""
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
            if is_there and follows and hashes[one] not in record.below[self.tier]:
                taken_in.add(hashes[one])
        return taken_in

    def check(self) -> None:
        """The core and the slot table agree on how many blocks there are; and so do watchers on
        which, once all that was lost is swept."""
        block_count = self.disk.block_count(self._epochs())
        assert self.counts.block_count == block_count, f"{self.tier}: not as in its table"
        if not self._world.turns:
            for record in self._world.namespaces.values():
                if record.is_open:
                    blocks = self.disk.blocks_of(record)
                    assert blocks == record.below[self.tier], f"{self.tier}: slots are lost"

    def assert_all_free(self) -> None:
        """Every block of an open namespace is void: only segments that are being filled are left,
        and what belongs to namespaces that nobody has opened."""
        counts, disk = self.counts, self.disk
        is_open = {one.fingerprint for one in self._world.namespaces.values() if one.is_open}
        left = {
            slot // disk.row_count_max
            for slot, row in disk.rows.items()
            if row.fingerprint not in is_open
        }
        filling_count = len(is_open) * disk.lane_count
        assert counts.demoting_count == counts.promoting_count == 0, counts
        assert counts.free_segment_count >= disk.segment_count - len(left) - filling_count, counts

    @property
    def counts(self) -> LowerCounts:
        return self._world.manager.stats().lower[self.tier]

    def _epochs(self) -> dict[bytes, int]:
        return {one.fingerprint: one.epoch for one in self._world.namespaces.values()}


def readable_count(
    shells: Mapping[TierName, LowerShell], record: NamespaceRecord, hashes: Sequence[BlockHash]
) -> int:
    """Length of the prefix that is resident, and whose bytes are as they should be wherever a block
    might be read from."""
    right = {
        tier: shell.disk.right_blocks(record)
        for tier, shell in shells.items()
        if shell.disk.readable
    }
    for count, block in enumerate(hashes):
        having = [tier for tier in right if block in record.below[tier]]
        is_right = bool(having) and all(block in right[tier] for tier in having)
        if block not in record.in_memory and not is_right:
            return count
    return len(hashes)


def origins_of(
    shells: Mapping[TierName, LowerShell],
    record: NamespaceRecord,
    hashes: Sequence[BlockHash],
    match: PrefixMatch,
) -> dict[TierName, int]:
    """How many blocks of a match are where, if all tiers are open: behind what leads in memory each
    counts for the fastest one that has it."""
    readable = [tier for tier, shell in shells.items() if shell.disk.readable]
    counts = Counter({TierName.DRAM: match.memory_count})
    for block in hashes[match.memory_count : match.matched_count]:
        having = [tier for tier in readable if block in record.below[tier]]
        counts[having[0] if having else list(shells)[-1]] += 1
    return dict(+counts)
