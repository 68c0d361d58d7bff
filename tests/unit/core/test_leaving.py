"""Of a chain that leaves memory: how much of it may go with its last block."""

from __future__ import annotations

import random

import numpy as np

from kvtier.core.leaving import Leaving
from kvtier.core.namespace_facts import NamespaceFacts
from kvtier.core.residency import Residency
from kvtier.policy.eviction import Evictable
from kvtier.policy.lru import LruPolicy
from kvtier.types import BlockHash, NamespaceId, SessionId, SlabSetId

MINE = SessionId(7)
SLOTS = 4096


def step_by_step(leaving: Leaving, row: int, count: int) -> list[int]:
    """As `ChainOf` says, by what `may_evict` says once those after a block are gone."""
    index, chain = leaving.index, [row]
    while len(chain) < count:
        row = int(index.parent[row])
        if row < 0 or index.memory_children[row] != 1:
            break
        index.memory_children[row] = 0
        verdict = leaving.may_evict(row)
        index.memory_children[row] = 1
        if verdict is not Evictable.YES:
            break
        chain.append(row)
    return chain


def test_chain_ends_where_its_blocks_would_not_go_one_by_one() -> None:
    chance = random.Random(3)
    facts = NamespaceFacts(NamespaceId(1), 32, 4096, 1)
    residency = Residency(facts, epoch=1, set_slot_count=SLOTS, make_policy=LruPolicy)
    residency.tier.add_set(SlabSetId(1), 0)
    known: list[BlockHash] = []
    for turn in range(60):
        hashes = [BlockHash(chance.randbytes(32)) for _ in range(chance.randint(1, 120))]
        residency.evict(max(0, len(hashes) - residency.tier.allocator.free_count))
        known = [block for block in known if residency.index.row_of.get(block) is not None]
        parent = chance.choice(known) if known and chance.random() < 0.5 else None
        places = residency.tier.reserve(len(hashes), MINE, None)
        residency.commit(hashes, places, parent=parent, void=False, now=float(turn))
        known += hashes
        if turn % 3 == 0:
            held = [chance.choice(known)]
            residency.tier.pin_for_transfer(residency.index.place[residency.index.rows(held)])
    leaving = Leaving(residency.index, residency.tier)
    lengths = []
    for row in residency.index.row_of.rows():
        for count in (1, 40, 300):
            chain = list(leaving.chain_of(row, count))
            assert chain == step_by_step(leaving, row, count)
            lengths.append(len(chain))
    assert max(lengths) > 100
    assert np.unique(lengths).size > 50
