"""What is remembered, and that it never grows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtier.core.instructions import BlocksRemoved, NamespaceCleared
from kvtier.server.block_ring import RECORD_BYTES, BlockRing, shorts_of
from kvtier.server.history import BlockSeen, History, RequestCall
from kvtier.types import (
    BlockHash,
    CommitOutcome,
    Cut,
    NamespaceId,
    PackedHashes,
    RemovedFor,
    SessionId,
    TierName,
)

NS, OTHER = NamespaceId(1), NamespaceId(2)
BUDGET_BYTES = 64 << 10


def hashes(count: int, seed: int = 0) -> list[BlockHash]:
    random_bytes = random.Random(seed).randbytes
    return [BlockHash(random_bytes(32)) for _ in range(count)]


def removed(blocks: list[BlockHash], reason: RemovedFor = RemovedFor.ROOM) -> BlocksRemoved:
    return BlocksRemoved(NS, TierName.NVME, blocks, reason)


def call(request_id: str, *, at: float = 0.0, count: int = 4, name: str = "Match") -> RequestCall:
    blocks = hashes(count)
    return RequestCall(
        request_id=request_id,
        call=name,
        session=SessionId(1),
        namespace=NS,
        at=at,
        seconds=0.001,
        hashes=PackedHashes(b"".join(blocks), 32),
        asked_count=count,
        found_count=0,
        tiers=(),
        cut=Cut.MISS,
        missed=blocks[0],
    )


@pytest.fixture
def history() -> History:
    return History(budget_bytes=BUDGET_BYTES)


def test_a_removal_is_remembered_with_tier_reason_and_time(history: History) -> None:
    blocks = hashes(3)
    for place, reason in enumerate(RemovedFor):
        history.on_removed(removed(blocks, reason), float(place))
    seen = history.events_of(NS, blocks[1], 99)
    assert seen == [
        BlockSeen("removed", reason.value, "nvme", float(place))
        for place, reason in reversed(list(enumerate(RemovedFor)))
    ]
    assert history.events_of(OTHER, blocks[1], 99) == []
    assert history.events_of(NS, hashes(1, seed=9)[0], 99) == []
    assert history.namespaces_of(blocks[1]) == {NS}
    assert history.namespaces_of(hashes(1, seed=9)[0]) == set()


def test_misses_and_refusals_stand_beside_removals_in_order(history: History) -> None:
    [block] = hashes(1)
    history.note_missed(NS, block, Cut.PIN_LIMIT, 1.0)
    history.on_removed(removed([block]), 2.0)
    outcomes = bytes([CommitOutcome.NO_PARENT])
    history.note_refused(NS, [block], outcomes, 3.0)
    told = [(seen.what, seen.why) for seen in history.events_of(NS, block, 8)]
    assert told == [("refused", "no_parent"), ("removed", "room"), ("missed", "pin_limit")]
    assert len(history.events_of(NS, block, 2)) == 2


def test_the_history_never_takes_more_than_its_budget(history: History) -> None:
    for turn in range(300):
        blocks = hashes(100, seed=turn)
        history.on_removed(removed(blocks), float(turn))
        history.note_missed(NS, blocks[0], Cut.MISS, float(turn))
        history.note_request(call(f"r{turn}", count=1 + 37 * turn % 5000))
        history.on_cleared(NamespaceCleared(NS, turn, 5), float(turn))
        assert history.taken_bytes <= BUDGET_BYTES
    assert history.events_of(NS, hashes(100, seed=299)[50], 1), "the latest are there"
    assert not history.events_of(NS, hashes(100, seed=0)[50], 1), "the oldest gave way"
    assert history.request("r299")
    assert not history.request("r0")
    assert len(history.happenings) <= 64


def test_it_is_known_since_when_all_removals_are_remembered(history: History) -> None:
    assert history.remembered_since is None
    for turn in range(60):
        history.on_removed(removed(hashes(100, seed=turn)), float(turn))
    since = history.remembered_since
    assert since is not None
    assert 30 < since < 50
    first_whole = hashes(100, seed=int(since) + 1)
    assert all(history.events_of(NS, block, 1) for block in first_whole)


def test_a_request_has_its_last_match_and_its_last_acquire(history: History) -> None:
    history.note_request(call("a", at=1.0))
    history.note_request(call("a", at=2.0, name="Acquire"))
    history.note_request(call("a", at=3.0))
    assert [(one.call, one.at) for one in history.request("a")] == [
        ("Match", 3.0),
        ("Acquire", 2.0),
    ]
    assert history.request("b") == []


def test_a_request_too_long_to_be_kept_whole_keeps_its_head(history: History) -> None:
    long = call("a", count=4000)
    history.note_request(long)
    [kept] = history.request("a")
    assert 0 < len(kept.hashes) < 4000
    assert kept.hashes[0] == long.hashes[0]
    assert (kept.asked_count, kept.missed) == (4000, long.missed)


def test_a_batch_larger_than_the_ring_leaves_its_last_blocks() -> None:
    ring = BlockRing(50 * RECORD_BYTES)
    blocks = hashes(175)
    ring.add(NS, blocks[:30], why=1, tier=0, at=1.0)
    ring.add(NS, blocks[30:], why=2, tier=0, at=2.0)
    there = [bool(ring.latest(NS, block, 1)) for block in blocks]
    assert there == [False] * 125 + [True] * 50


def test_the_last_of_many_blocks_are_found_together() -> None:
    ring = BlockRing(1000 * RECORD_BYTES)
    blocks = hashes(400)
    ring.add(NS, blocks, why=1, tier=2, at=1.0)
    ring.add(NS, blocks[:100], why=2, tier=3, at=2.0)
    found = ring.last_of(NS, shorts_of(blocks))
    whys = np.array([found[short].why for short in shorts_of(blocks).tolist()])
    assert (whys[:100] == 2).all()
    assert (whys[100:] == 1).all()


def test_a_ring_that_was_never_written_names_no_namespace() -> None:
    ring = BlockRing(BUDGET_BYTES)
    assert ring.namespaces_of(BlockHash(bytes(32))) == set(), "zeros are no record"
