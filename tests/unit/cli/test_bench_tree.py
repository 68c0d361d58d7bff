from __future__ import annotations

import pytest

from kvtier.cli.bench_tree import BRANCH_COUNT, HASH_BYTES, ChainTree, unpack
from kvtier.errors import BadRequest


def tree(resident_count: int = 1_000, seed: int = 1) -> ChainTree:
    return ChainTree(resident_count=resident_count, chain_length=64, seed=seed)


def resident(one: ChainTree) -> dict[bytes, bytes | None]:
    """Every block and its parent, as the runs tell them."""
    found: dict[bytes, bytes | None] = {}
    for first_parent, packed in one.runs():
        assert first_parent is None or first_parent in found, "a parent comes before its children"
        parent = first_parent
        for block in unpack(packed):
            assert block not in found, "a block comes twice"
            found[block] = parent
            parent = block
    return found


def test_exactly_as_many_blocks_as_asked_for_are_resident() -> None:
    assert len(resident(tree(1_000))) == 1_000


def test_full_chains_are_distinct_and_follow_the_tree() -> None:
    one = tree()
    parents = resident(one)
    chains = [one.full_chain(number) for number in range(one.full_chain_count)]
    assert one.full_chain_count == 1_000 // 120 * BRANCH_COUNT
    assert len({chain[-1] for chain in chains}) == one.full_chain_count
    for chain in chains:
        assert len(chain) == 64
        assert [parents[block] for block in chain] == [None, *chain[:-1]]


def test_a_part_chain_is_resident_to_its_depth_only() -> None:
    one = tree()
    known = resident(one)
    chain = one.part_chain(3, 10)
    assert [block in known for block in chain] == [True] * 10 + [False] * 54


def test_absent_chains_differ_each_time() -> None:
    one = tree()
    first, second = one.absent_chain(64), one.absent_chain(64)
    assert not {*first} & {*second}
    assert not {*first} & {*resident(one)}
    assert {len(block) for block in first} == {HASH_BYTES}


def test_two_processes_with_one_seed_know_the_same_chains() -> None:
    assert tree().full_chain(5) == tree().full_chain(5)
    assert tree().full_chain(5) != tree(seed=2).full_chain(5)


def test_too_few_blocks_for_one_tree_are_refused() -> None:
    with pytest.raises(BadRequest, match="at least 120"):
        tree(119)
