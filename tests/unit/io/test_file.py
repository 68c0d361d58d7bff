from __future__ import annotations

import errno

import numpy as np
import pytest

from kvtier.io.driver import Access, Batch, Outcome
from kvtier.io.file import CALL_BYTES_MAX, CALL_VIEWS_MAX, merge, outcome_of


def access(member: int, offset: int, length: int, views: int = 1) -> Access:
    return Access(member, offset, tuple([np.empty(length // views, np.uint8)] * views))


def members(runs: list[tuple[Access, ...]]) -> list[list[int]]:
    return [[one.member for one in run] for run in runs]


def test_only_neighbours_are_merged_whatever_their_order() -> None:
    accesses = [access(0, 300, 100), access(1, 0, 100), access(2, 100, 100), access(3, 500, 100)]
    assert members(merge(accesses)) == [[1, 2], [0], [3]]


def test_a_call_has_limits_of_bytes_and_views() -> None:
    half = CALL_BYTES_MAX // 2
    assert members(merge([access(i, i * half, half) for i in range(5)])) == [[0, 1], [2, 3], [4]]
    small = [access(i, i * CALL_VIEWS_MAX, CALL_VIEWS_MAX, CALL_VIEWS_MAX // 2) for i in range(3)]
    assert members(merge(small)) == [[0, 1], [2]]


def test_an_access_beyond_the_limit_of_a_call_goes_alone() -> None:
    large = [access(0, 0, 2 * CALL_BYTES_MAX), access(1, 2 * CALL_BYTES_MAX, 512)]
    assert members(merge(large)) == [[0], [1]]


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (errno.ENOSPC, Outcome.NO_SPACE),
        (errno.EDQUOT, Outcome.NO_SPACE),
        (errno.ENODEV, Outcome.GONE),
        (errno.ENXIO, Outcome.GONE),
        (errno.EIO, Outcome.EIO),
        (errno.EROFS, Outcome.EIO),
    ],
)
def test_an_error_of_the_kernel_has_a_meaning(number: int, outcome: Outcome) -> None:
    assert outcome_of(OSError(number, "planted")) is outcome


def test_an_empty_batch_has_ended_and_returned() -> None:
    told: list[str] = []
    batch = Batch(
        0, on_ended=lambda _: told.append("ended"), on_returned=lambda _: told.append("returned")
    )
    assert batch.wait(0) == []
    assert told == ["ended", "returned"]


def test_a_member_is_given_back_once() -> None:
    batch = Batch(2)
    batch.finish(0, Outcome.DONE)
    with pytest.raises(AssertionError, match="given back twice"):
        batch.finish(0, Outcome.DONE)
