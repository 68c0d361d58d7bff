"""The core with tiers below memory, in virtual time: all are far too small for what is asked.

Each has a disk with lanes that write and read one batch after the other, stalls now and then, loses
bits and fails; its slot table is written once a second; power is cut. With `faults` off only the
stalls are left: what a tier is good for can be measured then.
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
from tests.support.fake_mover import Transfer
from tests.support.lower_shell import LowerShell, readable_count

TABLE_SECONDS = 1.0
CUT_SECONDS = 12.0  # Mean time between two power cuts.
STALL_SECONDS = 2.0
MAP_SECONDS = 0.5
BYTES_PER_SECOND = {TierName.CXL: 1600 * SLOT_BYTES, TierName.NVME: 400 * SLOT_BYTES}

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
    """All faults of the other simulation, and those of disks."""

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
        self.disks = self.make_disks()
        self.cut_count = 0
        self._free_at = {tier: [0.0] * disk.lane_count for tier, disk in self.disks.items()}
        self._planned: set[Transfer] = set()
        self._failed_at: dict[NamespaceId, float] = {}
        super().__init__(seed, make_manager)
        self.later(TABLE_SECONDS, self._write_table)
        if self.faults:
            self.later(CUT_SECONDS, self._cut_power)

    @property
    def disk(self) -> FakeDisk:
        return self.disks[TierName.NVME]

    def make_disks(self) -> dict[TierName, FakeDisk]:
        nvme = FakeDisk(
            segment_bytes=16 * SLOT_BYTES, segment_count=10, row_count_max=16, lane_count=2
        )
        return {TierName.NVME: nvme}

    def start_daemon(self) -> None:
        super().start_daemon()
        manager = self.world.manager

        def open_lower(tier: TierName) -> None:
            if self.world.manager is manager:
                self.world.open_lower(tier, self.disks[tier])

        for tier in self.disks:
            self.later(0.5, lambda tier=tier: open_lower(tier))

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

    # -------------------------------------------------------------------------------- the disks

    def _step(self) -> None:
        super()._step()
        for shell in self.world.lower.values():
            for one in shell.mover.under_way:
                if one not in self._planned:
                    self._plan(shell, one)

    def _plan(self, shell: LowerShell, one: Transfer) -> None:
        """When its bytes move, and when it returns."""
        self._planned.add(one)
        slots, free_at = one.asked.lower_slots.tolist(), self._free_at[shell.tier]
        lane = slots[0] // shell.disk.row_count_max % shell.disk.lane_count
        length_bytes = len(slots) * self.slot_bytes[one.asked.namespace]
        begins_at = max(self.world.now, free_at[lane])
        if self.chance.random() < 0.02:
            begins_at += self.chance.expovariate(1.0 / STALL_SECONDS)
        free_at[lane] = ends_at = begins_at + length_bytes / BYTES_PER_SECOND[shell.tier]
        for member in range(len(slots)):
            if self.chance.random() < 0.5:
                self.at(begins_at, lambda member=member: _move(shell, one, member))
        self.at(ends_at, lambda: self._end(shell, one))

    def _end(self, shell: LowerShell, one: Transfer) -> None:
        if one not in shell.mover.under_way:
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
        shell.mover.finish(one, outcome)

    def _write_table(self) -> None:
        """Not always all of it, for power may be cut in the middle."""
        chosen = self.chance.getrandbits(16) if self.chance.random() < 0.3 else 0xFFFF
        is_synced = self.chance.random() < 0.5
        for disk in self.disks.values():
            disk.write_table(lambda page: bool(chosen >> (page % 16) & 1))
            if is_synced:
                disk.sync()
        self.later(TABLE_SECONDS, self._write_table)

    def _fault(self) -> None:
        if not self.faults:
            return
        super()._fault()
        for disk in self.disks.values():
            if disk.rows and self.chance.random() < 0.3:
                disk.scribble(self.chance.choice(sorted(disk.rows)))
        for shell in list(self.world.lower.values()):
            if self.chance.random() < 0.03:  # Until power is cut.
                shell.worsen(readable=self.chance.random() < 0.5)

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
        """Once more, with other engines; the disks work again."""
        for engine in self.engines:
            engine.vanish()
        self.engines.clear()
        is_open = set(self.world.lower)
        self.world.restart(keeps)
        for tier, disk in self.disks.items():
            if tier not in is_open:
                disk.cut_power(keeps)
            disk.readable = True
        self._planned.clear()
        self.start_daemon()

    def is_excused(self, namespace: NamespaceId, since: float) -> bool:
        """A read that was refused, a slab that was withdrawn: the blocks are there, below memory,
        and a miss for whoever waited all the same."""
        return self._failed_at.get(namespace, -1.0) >= since

    def expected_count(self, namespace: NamespaceId, hashes: list[BlockHash]) -> int:
        """Blocks whose bytes are lost are misses."""
        return readable_count(self.world.lower, self.world.namespaces[namespace], hashes)


TWO_RUNGS = replace(
    TIERED,
    lower={
        TierName.CXL: LowerSettings(
            write_bytes_per_hour=1e12,
            transfer_bytes_max=12 * SLOT_BYTES,
            batch_blocks=4,
            batch_bytes=8 * SLOT_BYTES,
            retire_wait_seconds=1.0,
            prefetch_fraction_max=0.3,
            is_compared=False,
        ),
        **TIERED.lower,
    },
)


class TwoRungsSimulation(TieredSimulation):
    """Above the disk a smaller, faster one that a power cut empties."""

    config = TWO_RUNGS

    def make_disks(self) -> dict[TierName, FakeDisk]:
        cxl = FakeDisk(
            segment_bytes=8 * SLOT_BYTES, segment_count=10, row_count_max=8, is_volatile=True
        )
        return {TierName.CXL: cxl, **super().make_disks()}


class DirectSimulation(TwoRungsSimulation):
    """Engines map the faster tier, a part of it at a time, and are leased what lies there."""

    def make_disks(self) -> dict[TierName, FakeDisk]:
        disks = super().make_disks()
        disks[TierName.CXL].is_direct = True
        return disks

    def __init__(
        self, seed: int, make_manager: Callable[[ManagerConfig], BlockManager] | None = None
    ) -> None:
        super().__init__(seed, make_manager)
        self.direct_count = 0  # Reads, of engines that are gone as well.
        self.later(MAP_SECONDS, self._map)

    def _map(self) -> None:
        for engine in self.engines:
            for process in engine.processes:
                if self.chance.random() < 0.7:
                    engine.map_segments(process, self.chance.choice((4, 8, 10)))
            self.direct_count += engine.tally.direct_count
            engine.tally.direct_count = 0
        self.later(MAP_SECONDS, self._map)


def _move(shell: LowerShell, one: Transfer, member: int) -> None:
    if one in shell.mover.under_way:
        shell.mover.move(one, member)
