"""The core with an NVMe tier, in virtual time: memory and pool are far too small for what is asked.

The disk has lanes that write and read one batch after the other, stalls now and then, loses bits
and fails; its slot table is written once a second; power is cut. With `faults` off only the stalls
are left: what the tier is good for can be measured then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

from kvtier.core.events import TransferOutcome
from kvtier.core.manager import BlockManager
from kvtier.core.settings import LowerSettings, ManagerConfig
from kvtier.types import BlockHash, NamespaceId, TierName
from tests.sim.simulation import CONFIG, ONE_SHARD, RIVAL, SLOT_BYTES, TWO_SHARDS, Simulation
from tests.support.fake_disk import FakeDisk
from tests.support.fake_mover import FakeMover, Transfer

TABLE_SECONDS = 1.0
CUT_SECONDS = 12.0  # Mean time between two power cuts.
STALL_SECONDS = 2.0
BYTES_PER_SECOND = 400 * SLOT_BYTES

TIERED = replace(
    CONFIG,
    slab_bytes=16 * SLOT_BYTES,
    slab_count_max=6,
    lower={
        TierName.NVME: LowerSettings(
            write_bytes_per_hour=1e9,
            transfer_bytes_max=24 * SLOT_BYTES,
            batch_blocks=6,
            batch_bytes=12 * SLOT_BYTES,
            retire_wait_seconds=2.0,
            prefetch_fraction_max=0.2,
        )
    },
)


class TieredSimulation(Simulation):
    """All faults of the other simulation, and those of a disk."""

    faults = True
    config = TIERED
    conversation_count = 40
    skew = 0.08
    request_seconds = 0.15
    wait_seconds = 1.0
    slot_bytes = MappingProxyType(
        {ONE_SHARD: SLOT_BYTES, RIVAL: 2 * SLOT_BYTES, TWO_SHARDS: SLOT_BYTES}
    )

    def __init__(
        self, seed: int, make_manager: Callable[[ManagerConfig], BlockManager] | None = None
    ) -> None:
        self.disk = self.make_disk()
        self.cut_count = 0
        self._free_at = [0.0] * self.disk.lane_count
        self._planned: set[Transfer] = set()
        self._failed_at: dict[NamespaceId, float] = {}
        super().__init__(seed, make_manager)
        self.later(TABLE_SECONDS, self._write_table)
        if self.faults:
            self.later(CUT_SECONDS, self._cut_power)

    def make_disk(self) -> FakeDisk:
        return FakeDisk(
            segment_bytes=16 * SLOT_BYTES, segment_count=10, row_count_max=16, lane_count=2
        )

    def start_daemon(self) -> None:
        super().start_daemon()
        manager = self.world.manager

        def open_nvme() -> None:
            if self.world.manager is manager:
                self.world.open_nvme(self.disk)

        self.later(0.5, open_nvme)

    def open_namespace(self, namespace: NamespaceId) -> None:
        """After a restart nobody may use it for a while; then it is opened, and joined."""
        if not self.faults or not self.cut_count or self.chance.random() < 0.6:
            super().open_namespace(namespace)
            return
        manager = self.world.manager

        def open_late() -> None:
            if self.world.manager is manager:
                Simulation.open_namespace(self, namespace)
                for engine in self.engines:
                    engine.join(namespace)

        self.later(4.0, open_late)

    @property
    def mover(self) -> FakeMover | None:
        return None if self.world.nvme is None else self.world.nvme.mover

    # --------------------------------------------------------------------------------- the disk

    def _step(self) -> None:
        super()._step()
        for one in self.mover.under_way if self.mover is not None else []:
            if one not in self._planned:
                self._plan(one)

    def _plan(self, one: Transfer) -> None:
        """When its bytes move, and when it returns."""
        self._planned.add(one)
        slots = one.asked.lower_slots.tolist()
        lane = slots[0] // self.disk.row_count_max % self.disk.lane_count
        length_bytes = len(slots) * self.slot_bytes[one.asked.namespace]
        begins_at = max(self.world.now, self._free_at[lane])
        if self.chance.random() < 0.02:
            begins_at += self.chance.expovariate(1.0 / STALL_SECONDS)
        self._free_at[lane] = ends_at = begins_at + length_bytes / BYTES_PER_SECOND
        for member in range(len(slots)):
            if self.chance.random() < 0.5:
                self.at(begins_at, lambda member=member: self._move(one, member))
        self.at(ends_at, lambda: self._end(one))

    def _move(self, one: Transfer, member: int) -> None:
        if self.mover is not None and one in self.mover.under_way:
            self.mover.move(one, member)

    def _end(self, one: Transfer) -> None:
        if self.mover is None or one not in self.mover.under_way:
            return
        self._planned.discard(one)
        outcome = TransferOutcome.DONE
        if self.faults and self.chance.random() < 0.06:
            outcome = self.chance.choice(list(TransferOutcome))
        if outcome is not TransferOutcome.DONE:
            self._failed_at[one.asked.namespace] = self.world.now
        if outcome is TransferOutcome.CORRUPT and one.is_demotion:
            for engine in self.engines:
                for slot in one.asked.slots.tolist():
                    engine.drop_corrupt(slot)
        self.mover.finish(one, outcome)

    def _write_table(self) -> None:
        """Not always all of it, for power may be cut in the middle."""
        chosen = self.chance.getrandbits(16) if self.chance.random() < 0.3 else 0xFFFF
        self.disk.write_table(lambda page: bool(chosen >> (page % 16) & 1))
        if self.chance.random() < 0.5:
            self.disk.sync()
        self.later(TABLE_SECONDS, self._write_table)

    def _fault(self) -> None:
        if not self.faults:
            return
        super()._fault()
        if self.disk.rows and self.chance.random() < 0.3:
            self.disk.scribble(self.chance.choice(sorted(self.disk.rows)))
        if self.world.nvme is not None and self.chance.random() < 0.03:  # Until power is cut.
            self.world.nvme.worsen(readable=self.chance.random() < 0.5)

    def _trouble_blocks(self, kind: str) -> None:
        super()._trouble_blocks(kind)
        self._failed_at.update(dict.fromkeys(self.slot_bytes, self.world.now))

    # --------------------------------------------------------------------------------- the power

    def _cut_power(self) -> None:
        kept = self.chance.getrandbits(64)
        self.cut_count += 1
        self.restart(lambda place: bool(kept >> (place % 64) & 1))
        self.later(CUT_SECONDS, self._cut_power)

    def restart(self, keeps: Callable[[int], bool]) -> None:
        """Once more, with other engines; the disk works again."""
        for engine in self.engines:
            engine.vanish()
        self.engines.clear()
        if self.world.nvme is None:
            self.disk.cut_power(keeps)
        self.world.restart(keeps)
        self.disk.readable = True
        self._planned.clear()
        self.start_daemon()

    def is_excused(self, namespace: NamespaceId, since: float) -> bool:
        """A read that was refused, a slab that was withdrawn: the blocks are there, on NVMe, and a
        miss for whoever waited all the same."""
        return self._failed_at.get(namespace, -1.0) >= since

    def expected_count(self, namespace: NamespaceId, hashes: list[BlockHash]) -> int:
        """Blocks whose bytes are lost are misses."""
        return self.disk.readable_count(self.world.namespaces[namespace], hashes)
