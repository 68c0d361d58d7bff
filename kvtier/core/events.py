"""What the core is told. Events are values; `BlockManager.handle` turns them into instructions.

An event that touches a long chain is worked off in slices: the manager answers with
`Continue(event)` and expects that event back after other work had its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvtier.core import hints
from kvtier.core.erasing_events import ErasingEvent
from kvtier.layout import SegmentHeader
from kvtier.types import (
    BlockHash,
    EngineId,
    LeaseId,
    NamespaceId,
    Role,
    SessionId,
    SlabId,
    SlabSetId,
    TierName,
)

Slots = npt.NDArray[np.uint32]
HintSessionEnd = hints.HintSessionEnd
HintPaused = hints.HintPaused
HintTurnKind = hints.HintTurnKind
Prefetch = hints.Prefetch


# ------------------------------------------------------------------------ namespaces and slabs


# What one event takes in: about 2 ms.
FOUND_BLOCKS_MAX = 512


@dataclass(frozen=True, slots=True)
class NamespaceOpened:
    """A namespace is in use from now on; repeated opening changes nothing."""

    namespace: NamespaceId
    epoch: int
    hash_bytes: int
    slot_bytes: int  # Distance of two slots in one shard's arena.
    shard_count: int
    shard_bytes: int = 0  # Payload of one shard; needed where there is a tier below memory.
    fingerprint: bytes = b""  # Likewise.
    chained: bool = True  # Every block but the first of a prefix needs the one before it.
    block_tokens: int = 16
    tenant: str = ""  # Who pays for what it takes.


@dataclass(frozen=True, slots=True)
class SlabPopulated:
    """The pool has one more slab whose pages exist; nobody owns it yet."""

    slab: SlabId
    node: int | None = None  # The NUMA node that all its pages are on; None when that may be any.


@dataclass(frozen=True, slots=True)
class SlabMapped:
    """A worker process has mapped this slab of its shard: its engine may be given its slots."""

    session: SessionId
    slab: SlabId


@dataclass(frozen=True, slots=True)
class SegmentsMapped:
    """A worker process has mapped these segments of the tier whose slots may be leased."""

    session: SessionId
    segments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlabUnmapped:
    session: SessionId
    slab: SlabId


@dataclass(frozen=True, slots=True)
class Clear:
    """Void every block of the namespace; `epoch` is the new one, random and never used before."""

    namespace: NamespaceId
    epoch: int


# -------------------------------------------------------------------------------------- sessions


@dataclass(frozen=True, slots=True)
class SessionOpened:
    session: SessionId
    engine: EngineId
    role: Role
    shards: tuple[int, ...] = ()
    by_value: bool = False
    replaces: SessionId | None = None  # The same process's earlier session, proven by its token.
    node: int | None = None  # The NUMA node nearest to the worker's device; None when not known.
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class NamespaceJoined:
    """The session opened this namespace: offer it the slabs of its shards, now and later."""

    session: SessionId
    namespace: NamespaceId


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The connection ended; nothing is known of the process."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """The process behind this session (and behind those it replaced) is proven dead."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class SessionQuiet:
    """`session`'s process says that it touches no slot under session `about` any more."""

    session: SessionId
    about: SessionId


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The orderly end (Bye): the process's copies are drained, the session is over."""

    session: SessionId


# --------------------------------------------------------------------------------- blocks, leases


@dataclass(frozen=True, slots=True)
class Acquire:
    """Lease the longest resident prefix of `hashes` until `deadline` (seconds, monotonic).

    Blocks that are not in memory are promoted until `wait_until`; 0 takes what is in memory now.
    """

    session: SessionId
    namespace: NamespaceId
    hashes: Sequence[BlockHash]
    deadline: float
    skip_count: int = 0
    wait_until: float = 0.0
    takes_direct: bool = False  # Who asks understands slots of a tier below memory.
    lease: LeaseId | None = None  # Set by the manager when the event is continued.
    done_count: int = 0  # Likewise.
    is_promoting: bool = False  # Likewise.


@dataclass(frozen=True, slots=True)
class Release:
    session: SessionId
    leases: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True)
class Reserve:
    """Take up to `count` slots. For the daemon's own session (put) any slab will do."""

    session: SessionId
    namespace: NamespaceId
    count: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Publish filled slots under their hashes, in chain order; `parent` precedes the first."""

    session: SessionId
    namespace: NamespaceId
    hashes: Sequence[BlockHash]
    slots: Slots
    parent: BlockHash | None
    epoch: int  # The epoch the slots were reserved in.
    checksums: npt.NDArray[np.uint64] | None = None  # Computed by the worker, if at all.
    done_count: int = 0  # Set by the manager when the event is continued.
    outcomes: bytes = b""  # Likewise.


@dataclass(frozen=True, slots=True)
class Abort:
    session: SessionId
    namespace: NamespaceId
    slots: Slots


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict the blocks of this prefix, last block first, as far as nothing holds them."""

    namespace: NamespaceId
    hashes: Sequence[BlockHash]
    # Set by the manager when the event is continued.
    evicted_count: int = 0
    left_count: int | None = None


# ------------------------------------------------------------------------------- from the shell


class TransferOutcome(IntEnum):
    """How the move of one block between two tiers ended."""

    DONE = 0
    CORRUPT = 1  # The bytes read do not match their checksum.
    FAILED = 2  # The medium reported an error for this block.
    REFUSED = 3  # Never begun: nothing is known, nothing has changed.


@dataclass(frozen=True, slots=True)
class LowerOpened:
    """The pool of a tier below memory is read: it may be used from now on. Once in its life.

    `lives` are the segments that hold blocks, each with its rows that do, ascending.
    """

    segment_bytes: int
    segment_count: int
    row_count_max: int
    lane_count: int
    sequence_first: int
    lives: Sequence[tuple[SegmentHeader, npt.NDArray[np.int64]]] = ()
    is_writable: bool = True
    tier: TierName = TierName.NVME
    is_direct: bool = False  # Engines may be leased its slots as they are.
    key_id: int = 0  # Of the key that new segments are sealed with; 0 for none.
    owners: tuple[tuple[bytes, str], ...] = ()  # Fingerprints, each with its tenant.


@dataclass(frozen=True, slots=True)
class SlabsAdopted:
    """A slab set of the daemon's life before this one.

    All of its slots are held until `until`, when the last lease of that life must have ended; what
    follows says of some of them what else they are.
    """

    namespace: NamespaceId
    slabs: tuple[SlabId, ...]  # Index: shard.
    slot_first: int
    slot_count: int
    slot_next: int  # Numbers below it were given in that life, to sets that are no more too.
    until: float
    sessions: tuple[SessionId, ...] = ()  # Lost ones of that life, whose processes may map it.


@dataclass(frozen=True, slots=True)
class BlocksAdopted:
    """Blocks in adopted slots, written and committed in the former life; parents before children.

    `parents[i]` is the position of block i's parent in these lists, -1 for the first of a chain.
    """

    namespace: NamespaceId
    epoch: int
    packed: bytes  # The hashes, one after the other.
    parents: npt.NDArray[np.int32]
    slots: Slots
    are_summed: npt.NDArray[np.bool_]  # Whose checksum the slot table has.
    sequence_next: int  # Higher than that of every entry in the slot table.
    done_count: int = 0  # These are set by the manager when the event is continued.
    rows: npt.NDArray[np.int32] | None = None  # Index rows of the blocks done.
    change_count: int = -1
    own_count: int | None = 0  # Blocks done that are resident; None once some block has gone.


@dataclass(frozen=True, slots=True)
class ReservedAdopted:
    """Adopted slots that an engine was filling, under one of these lost sessions of the former
    life: they stay withheld until the quarantines of all have ended."""

    namespace: NamespaceId
    slots: Slots
    sessions: tuple[SessionId, ...]


@dataclass(frozen=True, slots=True)
class FreeAdopted:
    """Adopted slots that nobody has used: they held nothing, or the daemon itself was filling."""

    namespace: NamespaceId
    slots: Slots


@dataclass(frozen=True, slots=True)
class AdoptionEnded:
    """All that the slot table says of adopted slots has been told."""


@dataclass(frozen=True, slots=True)
class BlocksRecovered:
    """What a tier's pool held of this namespace when it was opened; parents before children.

    `parents[i]` is the position of block i's parent in these lists, -1 for the first of a chain.
    `sequences[i]` is the number of its segment's life: a block is gone if that has a new one since.
    """

    namespace: NamespaceId
    epoch: int
    packed: bytes  # The hashes, one after the other.
    parents: npt.NDArray[np.int32]
    lower_slots: Slots
    sequences: npt.NDArray[np.uint64]
    used_at: npt.NDArray[np.float64] | None = None  # Ascending with the last use; below 0.
    done_count: int = 0  # Set by the manager when the event is continued.
    rows: npt.NDArray[np.int32] | None = None  # Likewise: index rows of the blocks done.
    change_count: int = -1  # Likewise.
    # Likewise: how many blocks of those done are resident; None once some block has gone.
    own_count: int | None = 0
    tier: TierName = TierName.NVME


@dataclass(frozen=True, slots=True)
class BlocksFound:
    """Somebody else has put these blocks, in chain order behind `parent`, where this tier reads.

    At most FOUND_BLOCKS_MAX. `epoch` is the namespace's when they were looked for.
    """

    namespace: NamespaceId
    epoch: int
    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    tier: TierName


@dataclass(frozen=True, slots=True)
class LowerChanged:
    """The pool of a tier below memory is worse off: no more writes, or no use of it at all."""

    readable: bool
    tier: TierName = TierName.NVME


@dataclass(frozen=True, slots=True)
class Demoted:
    """Answer to Demote, once no call is under way: one outcome and one checksum a block."""

    namespace: NamespaceId
    slots: Slots
    lower_slots: Slots
    outcomes: npt.NDArray[np.uint8]  # TransferOutcome.
    checksums: npt.NDArray[np.uint64]
    tier: TierName = TierName.NVME


@dataclass(frozen=True, slots=True)
class Promoted:
    """Answer to Promote, once no call is under way: one outcome and one checksum a block."""

    namespace: NamespaceId
    lower_slots: Slots
    slots: Slots
    outcomes: npt.NDArray[np.uint8]  # TransferOutcome.
    checksums: npt.NDArray[np.uint64]
    tier: TierName = TierName.NVME


@dataclass(frozen=True, slots=True)
class ChecksumsComputed:
    """Answer to ComputeChecksums: one xxh3-64 a slot."""

    namespace: NamespaceId
    slots: Slots
    checksums: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Refitted:
    """Answer to Refit: what its work returned."""

    namespace: NamespaceId
    epoch: int
    result: object


@dataclass(frozen=True, slots=True)
class SlotsCorrupt:
    """Bytes of these slots do not match their checksum: void them and what depends on them."""

    namespace: NamespaceId
    slots: Slots


@dataclass(frozen=True, slots=True)
class WithdrawSlabSet:
    """Give the slabs of this set up (a smaller share, or the budget is needed elsewhere)."""

    slab_set: SlabSetId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: expire leases, end grace times, sweep what is void, keep watermarks."""


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """No new leases or reservations from now on."""


@dataclass(frozen=True, slots=True)
class DrainEnded:
    """New leases and reservations are welcome again."""


@dataclass(frozen=True, slots=True)
class SweepVoid:
    """Go on freeing what was voided; sent back by Continue only."""


Event = (
    NamespaceOpened
    | SlabPopulated
    | SlabMapped
    | SlabUnmapped
    | SegmentsMapped
    | Clear
    | SessionOpened
    | NamespaceJoined
    | SessionLost
    | ProcessDied
    | SessionQuiet
    | SessionEnded
    | Acquire
    | Release
    | Reserve
    | Commit
    | Abort
    | Refitted
    | Evict
    | HintSessionEnd
    | HintPaused
    | HintTurnKind
    | Prefetch
    | LowerOpened
    | SlabsAdopted
    | BlocksAdopted
    | ReservedAdopted
    | FreeAdopted
    | AdoptionEnded
    | BlocksRecovered
    | BlocksFound
    | LowerChanged
    | Demoted
    | Promoted
    | ChecksumsComputed
    | SlotsCorrupt
    | WithdrawSlabSet
    | Tick
    | DrainStarted
    | DrainEnded
    | SweepVoid
    | ErasingEvent
)
