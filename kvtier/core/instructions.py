"""What the core wants done. The shell runs instructions in order and reports back as events.

A reply (`LeaseGranted`, `SlotsReserved`, …) is the last instruction but for `Continue`: it answers
the event that was handled. `BlockManager.handle` raises a `KVTierError` instead of replying when a
request cannot be served; then nothing was changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.core.events import Event, Slots
from kvtier.layout import SegmentHeader
from kvtier.types import (
    BlockHash,
    Cut,
    EngineId,
    LeaseId,
    NamespaceId,
    PackedHashes,
    RemovedFor,
    SessionId,
    SlabId,
    SlabSetId,
    TierName,
)

# --------------------------------------------------------------------------------------- replies


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """Answers Acquire, at once or after LeasePending. `lease` is None when nothing was leased.

    `tiers`: where the leased blocks were found when they were asked for.
    """

    lease: LeaseId | None
    leased_count: int  # Blocks from the first on, skip_count included.
    slots: Slots  # Without the first skip_count blocks.
    deadline: float
    cut: Cut
    epoch: int
    tiers: tuple[tuple[TierName, int], ...]
    # Which slots are those of the tier that is leased from directly; None where none is.
    is_direct: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class LeasePending:
    """Answers Acquire: blocks are being promoted; LeaseReady follows for this lease, whatever
    happens, but for a Release or the end of its engine before that."""

    lease: LeaseId
    matched_count: int  # Blocks that the lease will be on if all goes well.
    memory_count: int  # The leading run of these that is in memory already.


@dataclass(frozen=True, slots=True)
class LeasesEnded:
    """Answers Release: how many leases that call ended."""

    count: int


@dataclass(frozen=True, slots=True)
class SlotsReserved:
    """Answers Reserve; fewer than asked for (even none) when there are no more."""

    slots: Slots
    epoch: int
    stock_count_max: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Answers Commit: one CommitOutcome a block, one byte each."""

    outcomes: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class Aborted:
    count: int


@dataclass(frozen=True, slots=True)
class Evicted:
    evicted_count: int
    kept_count: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Answers Clear. The shell makes `epoch` durable *before* it tells anybody."""

    namespace: NamespaceId
    epoch: int
    voided_count: int


@dataclass(frozen=True, slots=True)
class SlotsHeld:
    """Answers HoldSlots: these are nobody's until SlotsErased.

    `left_count` more are free now. `waiting_count` are in use still: some of them being filled by
    an engine (`reserved_count`), some under a lease, others copied.
    """

    namespace: NamespaceId
    slots: Slots
    left_count: int
    reserved_count: int
    leased_count: int
    waiting_count: int


@dataclass(frozen=True, slots=True)
class RemainsHeld:
    """Answers HoldRemains: these bytes, (first, length) in the segment, are nobody's until
    RemainsErased; `void_rows` hold no block any more. `is_waiting`: nothing is held, for what was
    there is still being read or written. `is_whole`: the segment is in no use at all."""

    tier: TierName
    segment: int
    ranges: tuple[tuple[int, int], ...] = ()
    void_rows: tuple[int, ...] = ()
    is_waiting: bool = False
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class HintUsed:
    used: bool


@dataclass(frozen=True, slots=True)
class PrefetchBegun:
    """Answers Prefetch."""

    memory_count: int  # The leading run that is in memory already.
    promoting_count: int  # Being promoted because of this call.


Reply = (
    LeaseGranted
    | LeasePending
    | LeasesEnded
    | SlotsReserved
    | Committed
    | Aborted
    | Evicted
    | Cleared
    | SlotsHeld
    | RemainsHeld
    | HintUsed
    | PrefetchBegun
)


@dataclass(frozen=True, slots=True)
class LeaseReady:
    """Promotion for a pending lease has ended, or its wait: tell who acquired it."""

    lease: LeaseId
    granted: LeaseGranted


# ------------------------------------------------------------------------------------ slot table


@dataclass(frozen=True, slots=True)
class WriteReserved:
    """Slot table: these slots are RESERVED by `engine` (None: the daemon itself)."""

    namespace: NamespaceId
    slots: Slots
    engine: EngineId | None


@dataclass(frozen=True, slots=True)
class WriteReady:
    """Slot table: these slots hold these blocks; sequence numbers ascend from `sequence`."""

    namespace: NamespaceId
    slots: Slots
    hashes: Sequence[BlockHash]
    parents: Sequence[BlockHash | None]
    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class WriteChecksums:
    """Slot table: add the payload checksums to READY entries."""

    namespace: NamespaceId
    slots: Slots
    checksums: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class WriteGone:
    """Slot table: these slots hold nothing."""

    namespace: NamespaceId
    slots: Slots


@dataclass(frozen=True, slots=True)
class BindSegments:
    """Slot table of a tier below memory: these segments have a new life; what stood in their rows
    is gone."""

    headers: tuple[SegmentHeader, ...]
    tier: TierName = TierName.NVME


@dataclass(frozen=True, slots=True)
class WriteLowerReady:
    """Slot table of a tier below memory: these slots hold these blocks; sequence numbers ascend
    from `sequence`."""

    namespace: NamespaceId
    lower_slots: Slots
    hashes: Sequence[BlockHash]
    parents: Sequence[BlockHash | None]
    checksums: npt.NDArray[np.uint64]
    epoch: int
    sequence: int
    tier: TierName = TierName.NVME


@dataclass(frozen=True, slots=True)
class WriteLowerGone:
    """Slot table of a tier below memory: these slots hold nothing."""

    lower_slots: Slots
    tier: TierName = TierName.NVME


# ------------------------------------------------------------------------------ work for the shell


@dataclass(frozen=True, slots=True)
class Demote:
    """Write these blocks (pinned till then) to their slots in a tier below, if they still match the
    checksum in the slot table; answer with Demoted once no call is under way."""

    namespace: NamespaceId
    slots: Slots
    lower_slots: Slots
    hashes: Sequence[BlockHash] = ()
    tier: TierName = TierName.NVME


@dataclass(frozen=True, slots=True)
class Promote:
    """Read these slots of a tier below memory (pinned till then) into reserved slots and compare
    the checksums; answer with Promoted once no call is under way."""

    namespace: NamespaceId
    lower_slots: Slots
    slots: Slots
    hashes: Sequence[BlockHash] = ()
    tier: TierName = TierName.NVME


@dataclass(frozen=True, slots=True)
class ComputeChecksums:
    """Compute xxh3-64 of these slots (pinned till then), answer with ChecksumsComputed."""

    namespace: NamespaceId
    slots: Slots


@dataclass(frozen=True, slots=True)
class Refit:
    """Do this work, pure and on a copy, off the event loop, and answer with Refitted."""

    namespace: NamespaceId
    epoch: int
    work: Callable[[], object]


@dataclass(frozen=True, slots=True)
class BindSlabs:
    """These slabs (one a shard, shard 0 first) belong to `namespace` now."""

    namespace: NamespaceId
    slab_set: SlabSetId
    slabs: tuple[SlabId, ...]
    slot_first: int
    slot_count: int


@dataclass(frozen=True, slots=True)
class OfferSlab:
    """Send this slab to a worker process."""

    session: SessionId
    slab: SlabId
    shard: int


@dataclass(frozen=True, slots=True)
class WithdrawSlab:
    """Ask a worker process to unmap this slab."""

    session: SessionId
    slab: SlabId
    shard: int


@dataclass(frozen=True, slots=True)
class DropSlabs:
    """Nobody maps or holds these slabs any more: punch them out and populate new ones."""

    slab_set: SlabSetId
    slabs: tuple[SlabId, ...]


@dataclass(frozen=True, slots=True)
class RequestQuiet:
    """Ask the process of `session` to declare itself quiet about the lost session `about`."""

    session: SessionId
    about: SessionId


@dataclass(frozen=True, slots=True)
class AcknowledgeQuiet:
    session: SessionId
    about: SessionId


@dataclass(frozen=True, slots=True)
class RecallSlots:
    """Ask the session to abort up to `count` reserved slots no copy was planned for."""

    session: SessionId
    namespace: NamespaceId
    count: int


@dataclass(frozen=True, slots=True)
class Continue:
    """Send `event` back after other work has had its turn."""

    event: Event


# ---------------------------------------------------------------------------------- for watchers


@dataclass(frozen=True, slots=True)
class BlocksStored:
    namespace: NamespaceId
    tier: TierName
    hashes: Sequence[BlockHash]
    parent: BlockHash | None


@dataclass(frozen=True, slots=True)
class BlocksTakenIn:
    """Blocks of a former life that have their copy in this tier: those of `hashes` where `kept`."""

    namespace: NamespaceId
    tier: TierName
    hashes: PackedHashes
    kept: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """What has a replica in another tier stays resident there."""

    namespace: NamespaceId
    tier: TierName
    hashes: Sequence[BlockHash]
    reason: RemovedFor


@dataclass(frozen=True, slots=True)
class NamespaceCleared:
    namespace: NamespaceId
    epoch: int
    voided_count: int = 0


Instruction = (
    Reply
    | WriteReserved
    | WriteReady
    | WriteChecksums
    | WriteGone
    | BindSegments
    | WriteLowerReady
    | WriteLowerGone
    | LeaseReady
    | Demote
    | Promote
    | ComputeChecksums
    | BindSlabs
    | OfferSlab
    | WithdrawSlab
    | DropSlabs
    | Refit
    | RequestQuiet
    | AcknowledgeQuiet
    | RecallSlots
    | Continue
    | BlocksStored
    | BlocksTakenIn
    | BlocksRemoved
    | NamespaceCleared
)
