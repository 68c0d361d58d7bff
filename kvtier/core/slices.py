"""What one step on the blocks of a namespace found, published or ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.core.index import Rows
from kvtier.core.replica import Places
from kvtier.types import BlockHash, Cut, TierName


@dataclass(frozen=True, slots=True)
class LeasedSlice:
    """What one slice of Acquire found, and pinned where it is in memory.

    A place is NOBODY where the engine has the block itself and only tiers below have it besides.
    """

    rows: Rows
    places: Places
    cut: Cut


@dataclass(frozen=True, slots=True)
class Lost:
    """What has gone: blocks by the tier that they have left, and slots that hold nothing now."""

    from_memory: list[BlockHash] = field(default_factory=list)
    from_lower: dict[TierName, list[BlockHash]] = field(default_factory=dict)
    lower_slots: dict[TierName, list[int]] = field(default_factory=dict)

    def note_lower(self, tier: TierName, hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        self.from_lower.setdefault(tier, []).extend(hashes)
        self.lower_slots.setdefault(tier, []).extend(slots)


@dataclass(frozen=True, slots=True)
class CommittedSlice:
    """What one slice of Commit did; the lists are of the blocks that became READY."""

    outcomes: bytes
    ready: Places
    ready_positions: list[int]  # Positions in the slice.
    hashes: list[BlockHash]
    parents: list[BlockHash | None]
