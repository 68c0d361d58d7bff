"""What the fake shell knows of a namespace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.types import BlockHash, EngineId, TierName


@dataclass
class NamespaceRecord:
    """What a watcher knows of a namespace, and what the slot table says."""

    shard_count: int
    slot_bytes: int
    epoch: int
    fingerprint: bytes
    tenant: str = ""
    is_open: bool = False
    in_memory: set[BlockHash] = field(default_factory=set)
    below: dict[TierName, set[BlockHash]] = field(default_factory=lambda: defaultdict(set))
    ever_ready: set[BlockHash] = field(default_factory=set)
    ready_at: dict[int, BlockHash] = field(default_factory=dict)  # Slot -> block, slot table.
    filled_by: dict[int, EngineId | None] = field(default_factory=dict)  # Its RESERVED entries.
    void_at: set[int] = field(default_factory=set)  # Its entries of a former epoch.

    @property
    def on_nvme(self) -> set[BlockHash]:
        return self.below[TierName.NVME]

    @property
    def stored(self) -> set[BlockHash]:
        return self.in_memory.union(*self.below.values())

    def stored_in(self, tier: TierName) -> set[BlockHash]:
        return self.in_memory if tier is TierName.DRAM else self.below[tier]

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.void_at.update(self.ready_at)
        self.forget_stored()
        self.ever_ready.clear()

    def forget_entries(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.ready_at.pop(slot, None)
            self.filled_by.pop(slot, None)
            self.void_at.discard(slot)

    def forget_stored(self) -> None:
        self.in_memory.clear()
        self.below.clear()
        self.ready_at.clear()
