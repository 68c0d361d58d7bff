"""Why a block was no hit."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from kvtier.core.instructions import BlocksRemoved, NamespaceCleared
from kvtier.server import missed as module
from kvtier.server.missed import Missed
from kvtier.types import (
    BlockHash,
    Cut,
    NamespaceId,
    PackedHashes,
    PrefixMatch,
    RemovedFor,
    TierName,
)

ONE, TWO = NamespaceId(1), NamespaceId(2)
HASHES = [BlockHash(bytes([number]) * 16) for number in range(6)]
PACKED = PackedHashes(b"".join(HASHES), 16)


@dataclass
class Core:
    """Says that so many leading blocks are resident."""

    matched_count: int = 0

    def match_packed(self, namespace: NamespaceId, packed: bytes) -> PrefixMatch:
        return PrefixMatch(self.matched_count, self.matched_count)


def removed(namespace: NamespaceId, hashes: list[BlockHash]) -> BlocksRemoved:
    return BlocksRemoved(namespace, TierName.DRAM, hashes, RemovedFor.ROOM)


def test_what_left_lately_is_evicted_in_its_own_namespace_only() -> None:
    missed = Missed(Core())  # type: ignore[arg-type]
    missed.on_removed(removed(ONE, HASHES[2:4]))
    assert missed.of_match(ONE, PACKED, PrefixMatch(2, 2)) == "evicted"
    assert missed.of_match(ONE, PACKED, PrefixMatch(4, 4)) == "unseen"
    assert missed.of_match(TWO, PACKED, PrefixMatch(2, 2)) == "unseen"
    assert missed.of_match(ONE, PACKED, PrefixMatch(6, 6)) == ""
    missed.on_cleared(NamespaceCleared(ONE, 7))
    assert missed.of_match(ONE, PACKED, PrefixMatch(2, 2)) == "unseen"


def test_a_lease_tells_its_cut_or_what_became_of_the_block() -> None:
    core = Core(matched_count=3)
    missed = Missed(core)  # type: ignore[arg-type]
    assert missed.of_lease(ONE, PACKED, 6, Cut.NONE) == ""
    assert missed.of_lease(ONE, PACKED, 2, Cut.PIN_LIMIT) == "pin_limit"
    assert missed.of_lease(ONE, PACKED, 2, Cut.MISS) == "doubt"
    assert missed.of_lease(ONE, PACKED, 3, Cut.MISS) == "unseen"
    missed.on_removed(removed(ONE, HASHES[3:4]))
    assert missed.of_lease(ONE, PACKED, 3, Cut.MISS) == "evicted"


def test_the_memory_of_what_left_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEPARTED_BLOCKS_MAX", 2)
    missed = Missed(Core())  # type: ignore[arg-type]
    for block in HASHES[:5]:
        missed.on_removed(removed(ONE, [block]))
    known = [missed.of_match(ONE, PACKED, PrefixMatch(place, 0)) for place in range(6)]
    assert known == ["unseen", "unseen", "evicted", "evicted", "evicted", "unseen"]


def test_few_blocks_that_never_were_here_are_called_evicted() -> None:
    missed = Missed(Core())  # type: ignore[arg-type]
    chance = random.Random(1)
    gone, others = ([BlockHash(chance.randbytes(16)) for _ in range(60_000)] for _ in range(2))
    for first in range(0, len(gone), 64):
        missed.on_removed(removed(ONE, gone[first : first + 64]))
    said = Counter(reason_of(missed, block) for block in gone[::50])
    assert said == {"evicted": 1_200}
    wrong = sum(reason_of(missed, block) == "evicted" for block in others[::20])
    assert wrong <= 30  # Of 3,000.


def reason_of(missed: Missed, block: BlockHash) -> str:
    return missed.of_match(ONE, PackedHashes(block, 16), PrefixMatch(0, 0))
