"""Blocks that the index takes over from NVMe, many at once. Random stories are in tests/model."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from kvtier.core.index import IN_CALL, NOBODY, PrefixIndex
from kvtier.types import BlockHash, PackedHashes, TierName
from tests.support.world import chain

SLICE_SECONDS_MAX = 0.005


def adopt(index: PrefixIndex, *paths: str) -> list[int]:
    """Adopt the last block of each path; its parent is resident or the last of a path before."""
    ordinals = {path: number for number, path in enumerate(paths)}
    parents = []
    for path in paths:
        before = path[:-1]
        if not before:
            parents.append(NOBODY)
        elif before in ordinals:
            parents.append(IN_CALL - ordinals[before])
        else:
            parents.append(int(index.rows(chain(before))[-1]))
    return index.adopt(
        [chain(path)[-1] for path in paths],
        parents=np.array(parents, dtype=np.int32),
        lower_slots=np.arange(len(paths), dtype=np.int64) + 100,
    ).tolist()


def children_of(index: PrefixIndex, row: int) -> list[int]:
    """By the list of siblings, which is checked in both directions."""
    found: list[int] = []
    child = int(index._first_child[row])
    while child != NOBODY:
        assert int(index._previous_sibling[child]) == (found[-1] if found else NOBODY)
        assert int(index.parent[child]) == row
        found.append(child)
        child = int(index._next_sibling[child])
    return found


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex()


def test_adopted_blocks_are_resident_on_nvme_alone(index: PrefixIndex) -> None:
    rows = adopt(index, "a", "ab", "abc")
    assert index.rows(chain("abc")).tolist() == rows
    assert index.place[rows].tolist() == [NOBODY] * 3
    assert index.lower[TierName.NVME].slot[rows].tolist() == [100, 101, 102]
    assert index.memory_children[rows].tolist() == [0, 0, 0]
    assert index.check_invariants() == []


def test_chains_mixed_in_one_call_get_their_own_parents(index: PrefixIndex) -> None:
    paths = ["a", "x", "xb", "ab", "ac", "xbd", "abe", "y"]
    rows = dict(zip(paths, adopt(index, *paths), strict=True))
    for path, row in rows.items():
        assert index.parent_of(row) == rows.get(path[:-1])
        wanted = [rows[one] for one in paths if len(one) == len(path) + 1 and one[:-1] == path]
        assert children_of(index, row) == wanted
    assert index.match(chain("xbd")) == 3


def test_adopted_children_stand_beside_those_that_were_there(index: PrefixIndex) -> None:
    [parent] = index.insert_run(chain("a"), parent=None, places=np.zeros(1, np.int32)).tolist()
    before = adopt(index, "ab", "ac")
    after = adopt(index, "ad", "ae")
    assert children_of(index, parent) == [*after, *before]
    for gone, left in ((before[0], [*after, before[1]]), (after[0], [after[1], before[1]])):
        index.remove(gone)
        assert children_of(index, parent) == left


def test_rows_used_before_are_adopted_as_if_they_were_new(index: PrefixIndex) -> None:
    places = np.arange(4, dtype=np.int32)
    rows = index.insert_run(chain("abcd"), parent=None, places=places).tolist()
    index.doom(rows[0])
    while index.sweep_pending:
        index.forget_rows(index.sweep(10)[0])
    adopted = adopt(index, "x", "xy", "xz", "q", "xyz")
    assert set(adopted) > set(rows)
    assert index.place[adopted].tolist() == [NOBODY] * 5
    assert index.memory_children[adopted].tolist() == [0] * 5
    assert children_of(index, adopted[0]) == [adopted[1], adopted[2]]
    assert children_of(index, adopted[3]) == []
    assert index.check_invariants() == []


def test_a_row_forgets_beside_whom_it_stood(index: PrefixIndex) -> None:
    [_, first, second, other] = adopt(index, "a", "ab", "ac", "x")
    for gone in (first, second):
        index.remove(gone)
        assert adopt(index, "xy") == [gone]
        assert children_of(index, other) == [gone]
        index.remove(gone)
        adopt(index, "ab" if gone == first else "ac")


def test_a_chain_begins_in_a_row_that_had_siblings(index: PrefixIndex) -> None:
    [parent, first, second] = adopt(index, "a", "ab", "ac")
    index.remove(first)
    assert adopt(index, "x") == [first]
    [third] = adopt(index, "ad")
    index.remove(first)
    assert children_of(index, parent) == [third, second]


def test_a_resident_block_is_not_adopted(index: PrefixIndex) -> None:
    adopt(index, "a")
    with pytest.raises(AssertionError):
        adopt(index, "b", "a")


def test_adopting_nothing_changes_nothing(index: PrefixIndex) -> None:
    assert adopt(index) == []
    assert len(index) == 0


@pytest.mark.slow
def test_4096_blocks_are_adopted_well_within_one_slice() -> None:
    """Processor time; on a slow or busy machine, a few times that of a dict of the same hashes."""
    index, chance, whole = PrefixIndex(), random.Random(3), dict[BlockHash, int]()
    seconds, dict_seconds, first = [], [], IN_CALL + 1
    for number in range(50):
        packed = PackedHashes(chance.randbytes(4096 * 32), 32)
        parents = np.array(
            [first, *(IN_CALL - chance.randrange(one) for one in range(1, 4096))], dtype=np.int32
        )
        slots = np.arange(4096, dtype=np.int64) + 4096 * number
        hashes, again = packed[:4096], packed[:4096]  # Each is hashed once, as in life.
        start = time.thread_time()
        whole.update(zip(again, range(4096), strict=True))
        middle = time.thread_time()
        rows = index.adopt(hashes, parents=parents, lower_slots=slots)
        seconds.append(time.thread_time() - middle)
        dict_seconds.append(middle - start)
        first = int(rows[-1])
    usual, usual_dict = sorted(seconds)[25], sorted(dict_seconds)[25]
    assert usual < max(SLICE_SECONDS_MAX, 6 * usual_dict), "adopting is too slow"


def test_columns_grow_one_after_the_other(index: PrefixIndex) -> None:
    """All at once, at a million blocks, they hold the event loop for 20 ms."""
    chance, grown_counts = random.Random(4), []
    columns = [one for one in vars(index).values() if isinstance(one, np.ndarray)]
    columns += [index.lower[TierName.NVME].slot, index.lower[TierName.NVME].flags]
    assert len(columns) >= 10
    for number in range(200):
        before = [len(one) for one in columns]
        index.adopt(
            PackedHashes(chance.randbytes(256 * 32), 32)[:],
            parents=np.full(256, NOBODY, dtype=np.int32),
            lower_slots=np.arange(256, dtype=np.int64) + 256 * number,
        )
        grown_counts.append(sum(len(one) > old for one, old in zip(columns, before, strict=True)))
    assert min(map(len, columns)) >= 200 * 256
    assert sum(grown_counts[100:]) >= len(columns)
    assert max(grown_counts[100:]) <= 2
    assert max(map(len, columns)) < 200 * 256 * 1.13
