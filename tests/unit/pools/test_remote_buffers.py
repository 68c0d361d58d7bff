"""Buffers that are used again: never by two at once, never more than are wanted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.pools.remote.buffers import Buffers


def test_a_buffer_that_was_given_back_is_used_again() -> None:
    buffers = Buffers()
    one = buffers.take(100_000)
    buffers.give_back(one)
    other = buffers.take(110_000)
    assert np.shares_memory(one, other)
    assert (one.nbytes, other.nbytes) == (100_000, 110_000)
    assert buffers.kept_bytes == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300_000)), max_size=40))
def test_no_two_have_the_same_memory(steps: list[tuple[bool, int]]) -> None:
    buffers = Buffers(kept_bytes_max=1 << 20)
    held: list[np.ndarray] = []
    for takes, size in steps:
        if takes:
            taken = buffers.take(size)
            assert taken.nbytes == size
            assert not any(np.shares_memory(taken, other) for other in held)
            held.append(taken)
        elif held:
            buffers.give_back(held.pop(size % len(held)))
        assert buffers.kept_bytes <= 1 << 20


def test_what_was_not_taken_here_is_not_kept() -> None:
    buffers = Buffers()
    for foreign in (
        np.empty(64 << 10, np.uint8),
        np.frombuffer(bytes(64 << 10), np.uint8),
        np.empty(8 << 10, np.uint64)[:10].view(np.uint8),
    ):
        buffers.give_back(foreign)
    assert buffers.kept_bytes == 0
