"""The beginning of a growing list."""

from __future__ import annotations

import pytest

from kvtier.connector.heads import Head


def test_head_is_the_beginning_whatever_is_appended_later() -> None:
    whole = [1, 2, 3, 4]
    head = Head(whole, 3)
    whole += [5, 6]
    assert list(head) == [1, 2, 3]
    assert len(head) == 3
    assert head[:2] == [1, 2]
    assert head[1:] == [2, 3]
    assert head[-1] == 3
    with pytest.raises(IndexError):
        head[3]
    with pytest.raises(IndexError):
        head[-4]


def test_head_longer_than_its_whole_is_a_mistake() -> None:
    with pytest.raises(AssertionError):
        Head([1], 2)
