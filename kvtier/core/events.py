"""What the core is told. Events are values; `BlockManager.handle` turns them into instructions.

An event that touches a long chain is worked off in slices: the manager answers with
`Continue(event)` and expects that event back after other work had its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.types import (
    BlockHash,
    EngineId,
    LeaseId,
    NamespaceId,
    Role,
    SessionId,
    SlabId,
    SlabSetId,
)

Slots = npt.NDArray[np.uint32]


# ------------------------------------------------------------------------ namespaces and slabs


@dataclass(frozen=True, slots=True)
class NamespaceOpened:
    """A namespace is in use from now on; repeated opening changes nothing."""

    namespace: NamespaceId
    epoch: int
    hash_bytes: int
    slot_bytes: int  # Distance of two slots in one shard's arena.
    shard_count: int


@dataclass(frozen=True, slots=True)
class SlabPopulated:
    """The pool has one more slab whose pages exist; nobody owns it yet."""

    slab: SlabId


@dataclass(frozen=True, slots=True)
class SlabMapped:
    """A worker process has mapped this slab of its shard: its engine may be given its slots."""

    session: SessionId
    slab: SlabId


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
    """Lease the longest resident prefix of `hashes` until `deadline` (seconds, monotonic)."""

    session: SessionId
    namespace: NamespaceId
    hashes: Sequence[BlockHash]
    deadline: float
    skip_count: int = 0
    lease: LeaseId | None = None  # Set by the manager when the event is continued.
    done_count: int = 0  # Likewise.


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


@dataclass(frozen=True, slots=True)
class HintSessionEnd:
    """The prefix will not be continued."""

    namespace: NamespaceId
    hashes: Sequence[BlockHash]
    done_count: int = 0  # Set by the manager when the event is continued.


# ------------------------------------------------------------------------------- from the shell


@dataclass(frozen=True, slots=True)
class ChecksumsComputed:
    """Answer to ComputeChecksums: one xxh3-64 a slot."""

    namespace: NamespaceId
    slots: Slots
    checksums: npt.NDArray[np.uint64]


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
    | Evict
    | HintSessionEnd
    | ChecksumsComputed
    | SlotsCorrupt
    | WithdrawSlabSet
    | Tick
    | DrainStarted
    | DrainEnded
    | SweepVoid
)
