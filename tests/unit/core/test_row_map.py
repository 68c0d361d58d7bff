"""A map split into parts behaves as one."""

from __future__ import annotations

import pytest

from kvtier.core.row_map import RowMap
from kvtier.types import BlockHash


def hashes(count: int) -> list[BlockHash]:
    return [BlockHash(b"%032d" % number) for number in range(count)]


def test_every_block_is_found_where_it_was_put() -> None:
    found = RowMap()
    found.add(hashes(1000), range(1000))
    assert len(found) == 1000
    assert found.get_all(hashes(1001)) == [*range(1000), None]
    assert hashes(1)[0] in found
    assert sorted(found.rows()) == list(range(1000))
    assert dict(found.entries()) == dict(zip(hashes(1000), range(1000), strict=True))


def test_a_block_that_is_there_is_not_added_again() -> None:
    found = RowMap()
    found.add(hashes(1), [0])
    with pytest.raises(AssertionError):
        found.add(hashes(1), [1])


def test_many_are_added_as_few_are() -> None:
    found = RowMap()
    found.add(hashes(3), range(3))
    found.add_many(hashes(1000)[3:], range(3, 1000))
    assert found.get_all(hashes(1001)) == [*range(1000), None]
    with pytest.raises(AssertionError):
        found.add_many(hashes(1001)[999:], [1, 2])


def test_removed_blocks_are_gone_and_counted() -> None:
    found = RowMap()
    found.add(hashes(3), range(3))
    found.remove(hashes(1)[0])
    assert (len(found), found.get(hashes(1)[0])) == (2, None)
    assert sorted(found.pop_some(1) + found.pop_some(5)) == [1, 2]
    assert len(found) == 0
