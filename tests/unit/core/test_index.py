"""The prefix index: runs, gaps, doomed subtrees. Random stories are in tests/model."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.core.index import PrefixIndex
from tests.support.world import chain


def insert(index: PrefixIndex, path: str, *, after: str = "") -> list[int]:
    """Insert the blocks of `path` that follow those of `after`."""
    parent = int(index.rows(chain(after))[-1]) if after else None
    hashes = chain(path)[len(after) :]
    places = np.arange(len(hashes), dtype=np.int32)
    return index.insert_run(hashes, parent=parent, places=places).tolist()


def sweep(index: PrefixIndex, count: int = 100) -> int:
    rows, left = index.sweep(count)
    index.forget_rows(rows)
    return len(left)


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex()


@pytest.mark.parametrize("resident_count", range(20))
def test_every_length_of_prefix_is_found(index: PrefixIndex, resident_count: int) -> None:
    path = "abcdefghijklmnopqrst"
    if resident_count:
        insert(index, path[:resident_count])
    assert index.match(chain(path)) == resident_count


def test_nothing_matches_nothing(index: PrefixIndex) -> None:
    insert(index, "ab")
    assert index.match([]) == 0
    assert len(index.rows([])) == 0


def test_rows_end_at_the_first_gap(index: PrefixIndex) -> None:
    rows = insert(index, "ab")
    assert index.rows([*chain("ab"), *chain("x"), *chain("ab")]).tolist() == rows


@pytest.mark.parametrize("gap", [0, 1, 31, 32, 33, 95, 96, 200, 299])
def test_rows_of_long_chains_are_those_of_their_hashes(index: PrefixIndex, gap: int) -> None:
    """Whether or not they lie in one run, and up to the gap."""
    path = "".join(map(chr, range(0x4E00, 0x4E00 + 300)))
    insert(index, path[:40])
    sibling = insert(index, path[:40] + "z" * 5, after=path[:40])  # Runs end and begin anywhere.
    insert(index, path[:130], after=path[:40])
    index.doom(sibling[0])
    sweep(index)
    insert(index, path, after=path[:130])  # In the rows of the siblings first.
    hashes = chain(path)
    wanted = [index.row_of.get(block) for block in hashes]
    assert index.rows(hashes).tolist() == wanted
    asked = [*hashes[:gap], *chain("other"), *hashes[gap:]]
    assert index.rows(asked).tolist() == wanted[:gap]


def test_a_doomed_block_that_was_not_swept_yet_has_no_row(index: PrefixIndex) -> None:
    path = "abcdefghijklmnopqrstuvwxyz"
    rows = insert(index, path)
    index.doom(rows[20])
    assert index.rows(chain(path)).tolist() == rows[:20]


def test_a_block_is_a_leaf_until_it_is_continued(index: PrefixIndex) -> None:
    [first, second] = insert(index, "ab")
    assert not index.is_leaf(first)
    assert index.is_leaf(second)
    insert(index, "abc", after="ab")
    assert not index.is_leaf(second)


def test_the_last_child_to_leave_memory_is_told_with_its_parent(index: PrefixIndex) -> None:
    [parent, first] = insert(index, "ab")
    [second] = insert(index, "ac", after="a")
    assert index.leave_memory([first]) is None
    assert index.leave_memory([second]) == parent
    assert not index.is_leaf(parent)


def test_a_child_that_enters_memory_counts_again(index: PrefixIndex) -> None:
    [parent, child] = insert(index, "ab")
    index.leave_memory([child])
    index.enter_memory(np.array([child], dtype=np.int32))
    assert index.memory_children[parent] == 1


def test_removing_the_last_child_makes_the_parent_a_leaf(index: PrefixIndex) -> None:
    [parent, first] = insert(index, "ab")
    [second] = insert(index, "ac", after="a")
    index.remove(first)
    assert not index.is_leaf(parent)
    index.remove(second)
    assert index.is_leaf(parent)


def test_a_block_with_children_is_not_removed(index: PrefixIndex) -> None:
    [parent, _] = insert(index, "ab")
    with pytest.raises(AssertionError):
        index.remove(parent)


def test_a_resident_block_is_not_inserted_again(index: PrefixIndex) -> None:
    insert(index, "a")
    with pytest.raises(AssertionError):
        insert(index, "a")


def test_a_doomed_subtree_is_out_of_reach_at_once(index: PrefixIndex) -> None:
    rows = insert(index, "abcd")
    index.doom(rows[1])
    assert index.match(chain("abcd")) == 1
    assert not index.has_row(rows[1])


def test_a_sweep_takes_the_whole_subtree_and_nothing_else(index: PrefixIndex) -> None:
    rows = insert(index, "abcd")
    insert(index, "abx", after="ab")
    insert(index, "ay", after="a")
    index.doom(rows[1])
    swept = 0
    while index.sweep_pending:
        swept += sweep(index, 1)
    assert swept == 3  # "ab" itself left the map before.
    assert (index.match(chain("abcd")), index.match(chain("ay"))) == (1, 2)
    assert index.check_invariants() == []


def test_a_doomed_block_may_come_back_before_it_is_swept(index: PrefixIndex) -> None:
    rows = insert(index, "abc")
    index.doom(rows[1])
    [anew] = insert(index, "ab", after="a")
    assert anew != rows[1]
    sweep(index)
    assert index.match(chain("abc")) == 2
    assert index.check_invariants() == []


def test_rows_are_used_again(index: PrefixIndex) -> None:
    for _ in range(5):
        rows = insert(index, "a" * 30)
        index.doom(rows[0])
        sweep(index)
    assert len(index.hash_of) == 1024


def test_an_index_nobody_uses_is_taken_apart_in_pieces(index: PrefixIndex) -> None:
    insert(index, "abcde")
    assert [index.dismantle(2) for _ in range(3)] == [False, False, True]
