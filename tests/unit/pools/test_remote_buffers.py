"""Buffers that are used again: never by two at once, never more than are wanted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.memory import HUGE_BYTES
from kvtier.pools.remote.buffers import Buffers, whole_of


def test_a_buffer_that_was_given_back_is_used_again() -> None:
    buffers = Buffers()
    one = buffers.take(200_000)
    buffers.give_back(one)
    other = buffers.take(220_000)
    assert np.shares_memory(one, other)
    assert (one.nbytes, other.nbytes) == (200_000, 220_000)
    assert buffers.kept_bytes == 0


def test_small_ones_are_not_kept() -> None:
    buffers = Buffers()
    for size in (1, 4096, 100_000):
        buffers.give_back(buffers.take(size))
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


def test_a_large_buffer_lies_on_huge_pages_and_is_used_again() -> None:
    buffers = Buffers()
    one = buffers.take((4 << 20) + 128)
    whole = whole_of(one)
    assert whole is not None
    assert whole.ctypes.data % HUGE_BYTES == 0
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags_at(whole.ctypes.data)
    buffers.give_back(one)
    assert buffers.kept_bytes == whole.nbytes
    assert whole_of(buffers.take((4 << 20) + 200)) is whole


def flags_at(address: int) -> list[str]:
    """What the kernel was told of the mapping there."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            first, last = (int(one, 16) for one in words[0].split("-"))
            is_there = first <= address < last
        elif is_there and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError("nothing is mapped there")


def test_rooms_of_small_buffers_end_after_a_burst() -> None:
    buffers = Buffers()
    burst = [buffers.take(40 << 10) for _ in range(500)]
    for number, one in enumerate(burst):
        one[:] = number % 251
    assert buffers.room_bytes >= 500 * (48 << 10)
    assert all((one == number % 251).all() for number, one in enumerate(burst))
    kept = burst.pop()
    place = kept.ctypes.data
    burst.clear()
    del one
    assert all(buffers.take(40 << 10).ctypes.data != place for _ in range(1000))
    assert buffers.room_bytes == 2 << 20  # An empty one, and that of the buffer that is in use.


def test_a_small_buffer_that_nobody_gives_back_is_used_again() -> None:
    buffers = Buffers()
    for _ in range(1000):
        buffers.take(40 << 10)[:] = 1
    assert buffers.room_bytes == 1 << 20
