"""The vocabulary as types; pure, importable from everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NewType, overload

import numpy as np

BlockHash = NewType("BlockHash", bytes)
"""16 to 32 bytes, chained: names the whole prefix up to and including the block."""

SlotIndex = NewType("SlotIndex", int)
"""A place in one pool, counted from 0; in memory pools the same number in each shard's arena."""

NamespaceId = NewType("NamespaceId", int)
SessionId = NewType("SessionId", int)
LeaseId = NewType("LeaseId", int)
SlabId = NewType("SlabId", int)
SlabSetId = NewType("SlabSetId", int)
EngineId = NewType("EngineId", bytes)
"""16 random bytes, equal in every process of one engine."""

PROTOCOL_VERSION = 1
"""Client protocol N works with daemon protocol N-1, N and N+1."""

REQUEST_ID_CHARS_MAX = 128
"""Of an engine's own id of a request, as it travels with Match and Acquire."""


class TierName(StrEnum):
    """The tiers, upper (nearer the GPU) first."""

    DRAM = "dram"
    CXL = "cxl"
    NVME = "nvme"
    REMOTE = "remote"


class Role(IntEnum):
    """What one process of an engine does; the values are those of the protocol."""

    SCHEDULER = 1
    WORKER = 2
    BOTH = 3
    TOOL = 4


class Cut(IntEnum):
    """Why a leased prefix ended where it did; the values are those of the protocol."""

    NONE = 0
    MISS = 1
    PIN_LIMIT = 2
    DEADLINE = 3
    NO_SPACE = 4
    UNMAPPED = 5
    DRAINING = 6


class RemovedFor(StrEnum):
    """Why a block left a tier."""

    ROOM = "room"  # The policy nominated it when others needed room, or ahead of that.
    SLAB = "slab"  # Its slab was withdrawn, for another namespace as a rule.
    SEGMENT = "segment"  # Its segment was reused.
    CORRUPT = "corrupt"
    READ_FAILED = "read_failed"
    TIER_OFF = "tier_off"  # The whole tier cannot be read any more.
    EVICT = "evict"  # An administrator said so.
    PARENT = "parent"  # A block before it has gone, which leaves it unreachable.


class CommitOutcome(IntEnum):
    """What became of one committed block; the values are those of the protocol."""

    READY = 0
    PRESENT = 1
    NO_PARENT = 2
    VOID = 3


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest resident prefix of a list of hashes."""

    matched_count: int
    memory_count: int  # Of these, the leading run that is in memory already.
    tiers: tuple[tuple[TierName, int], ...] = ()
    # Of an unchained namespace: a byte a hash, a Presence. Empty for all others.
    presence: bytes = b""


class Presence(IntEnum):
    """Where one block of an unchained namespace is."""

    ABSENT = 0
    LOWER = 1
    MEMORY = 2


@dataclass(frozen=True, slots=True)
class Worth:
    """What an onboard was worth to an engine, in time to its first token."""

    prefill_seconds: float  # What computing the blocks would have taken at its recent rate.
    onboard_seconds: float  # From its first question until they were there.


class PackedHashes(Sequence[BlockHash]):
    """Hashes as they travel: `count * hash_bytes` bytes, cut into hashes only when asked for."""

    __slots__ = ("_count", "_hash_bytes", "packed")

    def __init__(self, packed: bytes, hash_bytes: int) -> None:
        assert len(packed) % hash_bytes == 0, "a packed list of hashes ends inside a hash"
        self.packed = packed
        self._hash_bytes = hash_bytes
        self._count = len(packed) // hash_bytes

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockHash]: ...
    def __getitem__(self, index: int | slice) -> BlockHash | list[BlockHash]:
        size = self._hash_bytes
        packed = self.packed
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            count = stop - start
            if step == 1 and count > 0:  # For many, seven times as fast as one after the other.
                cut: list[BlockHash] = np.frombuffer(
                    packed, f"V{size}", count, start * size
                ).tolist()
                return cut
            return [
                BlockHash(packed[place * size : place * size + size])
                for place in range(start, stop, step)
            ]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        start = (index % self._count) * size
        return BlockHash(packed[start : start + size])
