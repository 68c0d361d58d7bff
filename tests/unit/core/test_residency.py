"""Index, slots and policy of one namespace stay in step."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.core.namespace_facts import NamespaceFacts
from kvtier.core.residency import Residency
from kvtier.core.slices import CommittedSlice
from kvtier.policy.lru import LruPolicy
from kvtier.types import (
    BlockHash,
    CommitOutcome,
    Cut,
    NamespaceId,
    Presence,
    SessionId,
    SlabSetId,
)
from tests.support.world import HASH_BYTES, chain

MINE = SessionId(7)


@pytest.fixture
def residency() -> Residency:
    facts = NamespaceFacts(NamespaceId(1), HASH_BYTES, 4096, 1)
    residency = Residency(facts, epoch=1, set_slot_count=16, make_policy=LruPolicy)
    residency.tier.add_set(SlabSetId(1), 0)
    return residency


@pytest.fixture
def unchained() -> Residency:
    facts = NamespaceFacts(NamespaceId(1), HASH_BYTES, 4096, 1, chained=False)
    residency = Residency(facts, epoch=1, set_slot_count=16, make_policy=LruPolicy)
    residency.tier.add_set(SlabSetId(1), 0)
    return residency


def commit(
    residency: Residency, hashes: list[BlockHash], parent: BlockHash | None = None, now: float = 0.0
) -> CommittedSlice:
    places = residency.tier.reserve(len(hashes), MINE, None)
    done = residency.commit(hashes, places, parent=parent, void=False, now=now)
    assert residency.check_invariants() == []
    return done


def lease(residency: Residency, hashes: list[BlockHash], *, limit: int = 16) -> tuple[int, Cut]:
    sliced = residency.lease(
        hashes, after=None, mapped_from=0, usable=None, limit_count=limit, now=1.0
    )
    return len(sliced.places), sliced.cut


def test_blocks_are_ready_in_chain_order(residency: Residency) -> None:
    done = commit(residency, chain("abc"))
    assert done.outcomes == bytes([CommitOutcome.READY] * 3)
    assert done.parents == [None, *chain("ab")]
    assert residency.index.match(chain("abc")) == 3


def test_the_same_block_twice_in_a_commit_is_present_the_second_time(
    residency: Residency,
) -> None:
    [block] = chain("a")
    done = commit(residency, [block, block])
    assert done.outcomes == bytes([CommitOutcome.READY, CommitOutcome.PRESENT])
    assert residency.tier.allocator.free_count == 15


def test_a_commit_goes_on_below_blocks_that_are_present(residency: Residency) -> None:
    commit(residency, chain("ab"))
    done = commit(residency, chain("abcd"))
    assert done.ready_positions == [2, 3]
    assert residency.index.match(chain("abcd")) == 4


def test_blocks_behind_a_refused_one_are_refused(residency: Residency) -> None:
    done = commit(residency, chain("abc")[1:], parent=chain("a")[0])
    assert done.outcomes == bytes([CommitOutcome.NO_PARENT] * 2)
    assert residency.tier.allocator.free_count == 16


def test_a_lease_stops_where_a_block_does_not_follow_the_one_before(residency: Residency) -> None:
    commit(residency, chain("ab"))
    commit(residency, chain("x"))
    assert lease(residency, [*chain("ab"), *chain("x")]) == (2, Cut.MISS)
    assert lease(residency, [chain("ab")[1]]) == (0, Cut.MISS)
    assert lease(residency, [*chain("ab"), chain("ab")[1]]) == (2, Cut.MISS)


def test_a_lease_stops_at_the_pin_limit(residency: Residency) -> None:
    commit(residency, chain("abc"))
    assert lease(residency, chain("abc"), limit=2) == (2, Cut.PIN_LIMIT)


def test_eviction_takes_the_oldest_chain_from_its_end(residency: Residency) -> None:
    commit(residency, chain("abc"), now=1.0)
    commit(residency, chain("xyz"), now=2.0)
    assert residency.evict(4) == [*reversed(chain("abc")), chain("xyz")[2]]
    assert residency.check_invariants() == []


def test_evicting_a_prefix_stops_at_the_first_block_that_is_held(residency: Residency) -> None:
    commit(residency, chain("abcd"))
    lease(residency, chain("ab"))
    count, lost = residency.evict_prefix(chain("abcd"))
    assert (count, lost.from_memory) == (2, list(reversed(chain("abcd")[2:])))


def test_void_blocks_are_told_once_and_leave_no_slot_taken(residency: Residency) -> None:
    done = commit(residency, chain("abcd"))
    told = residency.void_places(done.ready[[2, 1]])
    while residency.sweep_pending:
        told += residency.sweep(1).from_memory
    assert sorted(told) == sorted(chain("abcd")[1:])
    assert residency.tier.allocator.free_count == 15
    assert residency.check_invariants() == []


def test_the_parent_of_a_void_block_can_be_evicted_next(residency: Residency) -> None:
    done = commit(residency, chain("ab"))
    residency.void_places(done.ready[1:])
    assert residency.evict(1) == chain("a")


def test_every_voiding_is_counted(residency: Residency) -> None:
    done = commit(residency, chain("ab"))
    counts = [residency.void_count]
    residency.void_places(done.ready[:1])
    counts.append(residency.void_count)
    residency.void_places(np.zeros(0, dtype=np.int32))
    counts.append(residency.void_count)
    residency.clear(2)
    counts.append(residency.void_count)
    assert counts[0] < counts[1] == counts[2] < counts[3]


def test_unchained_blocks_need_no_parents_and_are_told_of_one_by_one(unchained: Residency) -> None:
    a, b, c, d = chain("abcd")
    done = commit(unchained, [b, d], parent=a)
    assert done.outcomes == bytes([CommitOutcome.READY] * 2)
    assert done.parents == [None, None]
    here, gone = Presence.MEMORY, Presence.ABSENT
    assert unchained.presence([a, b, c, d]).presence == bytes([gone, here, gone, here])
    assert unchained.presence([b, d, a]).matched_count == 2
    assert unchained.index.match([d, b, c]) == 2


def test_unchained_blocks_are_leased_in_any_order_up_to_the_first_that_is_not_there(
    unchained: Residency,
) -> None:
    a, b, c, d = chain("abcd")
    commit(unchained, [b, d, c])
    assert lease(unchained, [d, b]) == (2, Cut.NONE)
    assert lease(unchained, [c, a, b]) == (1, Cut.MISS)


def test_unchained_block_is_evicted_alone_and_a_duplicate_is_present(unchained: Residency) -> None:
    a, b, c = chain("abc")
    commit(unchained, [a, b, c])
    assert commit(unchained, [b]).outcomes == bytes([CommitOutcome.PRESENT])
    assert unchained.evict(1) == [a]
    here, gone = Presence.MEMORY, Presence.ABSENT
    assert unchained.presence([a, b, c]).presence == bytes([gone, here, here])
    assert unchained.check_invariants() == []
