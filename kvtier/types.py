"""The vocabulary as types; pure, importable from everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""16 to 32 bytes, chained: names the whole prefix up to and including the block."""

SlotIndex = NewType("SlotIndex", int)
"""A place in one pool, counted from 0; in memory pools the same number in each shard's arena."""

BlockRow = NewType("BlockRow", int)
"""Row of a block in its namespace's index, counted from 0; reused after the block is gone."""

NamespaceId = NewType("NamespaceId", int)
SessionId = NewType("SessionId", int)
LeaseId = NewType("LeaseId", int)
SlabId = NewType("SlabId", int)
SlabSetId = NewType("SlabSetId", int)
EngineId = NewType("EngineId", bytes)
"""16 random bytes, equal in every process of one engine."""

PROTOCOL_VERSION = 1
"""Client protocol N works with daemon protocol N-1, N and N+1."""


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
