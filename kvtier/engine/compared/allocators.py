"""Ways of giving KV memory to requests, behind one small interface: for comparison.

The engine itself is paged. What it would be without is measured here, in tokens: a place for one
token's KV is the unit, and no KV is kept. What a request will still need nobody knows but the
caller of `admit`, who tells it for the account (and to the oracle).

    max-length   one run of the longest context for every request (FasterTransformer)
    buddy        a run of a power of two that holds prompt and output (Orca's rounding)
    oracle       a run of exactly what will be needed (Orca, if it knew)
    paged        blocks, as the sequence grows (PagedAttention)
    virtual      a run of addresses for the longest context, its pages mapped as they are touched
                 (vAttention: Prabhu et al., ASPLOS 2025)
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtier.engine.blocks import DeviceBlockPool


@dataclass(frozen=True, slots=True)
class Need:
    """Tokens of one request."""

    prompt_count: int
    total_count: int  # With all that it will generate.


@dataclass(frozen=True, slots=True)
class Waste:
    """Where a memory's places are, in tokens; the rest of the capacity is free for use."""

    used_count: int  # KV is in them.
    reserved_count: int  # Held for tokens that will come.
    internal_count: int  # Held and never used.
    external_count: int  # Free, but in no piece that the next request could have.

    @property
    def wasted_share(self) -> float:
        """Of what is not free for use."""
        taken = self.used_count + self.reserved_count + self.internal_count + self.external_count
        return 1 - self.used_count / taken if taken else 0.0


class KvAllocator(Protocol):
    """`admit` and `append` change nothing where they answer False."""

    def admit(self, request_id: str, need: Need) -> bool:
        """Room for the prompt, and for whatever has to be held from the start."""
        ...

    def append(self, request_id: str) -> bool:
        """Room for one token more."""
        ...

    def release(self, request_id: str) -> None:
        """All that the request holds."""
        ...

    def waste(self, waiting: Need | None = None) -> Waste:
        """Now; `waiting` is the request that would come next."""
        ...


@dataclass(slots=True)
class _Held:
    """One request's."""

    need: Need
    used_count: int
    held_count: int
    start: int = 0

    def split(self) -> tuple[int, int]:
        """(reserved, internal) of what is held and not used."""
        reserved = min(self.held_count, self.need.total_count) - self.used_count
        return reserved, self.held_count - self.used_count - reserved


class _Accounts:
    """What all of them keep."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def waste(self, waiting: Need | None = None) -> Waste:
        splits = [held.split() for held in self._held.values()]
        return Waste(
            used_count=sum(held.used_count for held in self._held.values()),
            reserved_count=sum(reserved for reserved, _ in splits),
            internal_count=sum(internal for _, internal in splits),
            external_count=0 if waiting is None else self._unusable_count(waiting),
        )

    def _unusable_count(self, waiting: Need) -> int:
        return 0


class ContiguousAllocator(_Accounts):
    """One run of places for each request, of the size that `size_of` says; first fit. With
    `is_buddy` a run of 2^n begins at a multiple of 2^n: what is given back joins its other half."""

    def __init__(
        self, capacity: int, size_of: Callable[[Need], int], *, is_buddy: bool = False
    ) -> None:
        super().__init__()
        self._capacity = capacity
        self._size_of = size_of
        self._is_buddy = is_buddy

    def admit(self, request_id: str, need: Need) -> bool:
        size = self._size_of(need)
        assert size >= need.total_count, f"a run of {size} is too short for {need}"
        for start, end in self._holes():
            first = self._first(start, size)
            if first + size <= end:
                self._held[request_id] = _Held(need, need.prompt_count, size, first)
                return True
        return False

    def append(self, request_id: str) -> bool:
        self._held[request_id].used_count += 1
        return True

    def release(self, request_id: str) -> None:
        del self._held[request_id]

    def _first(self, start: int, size: int) -> int:
        return -(-start // size) * size if self._is_buddy else start

    def _holes(self) -> list[tuple[int, int]]:
        holes, end = [], 0
        for held in sorted(self._held.values(), key=lambda held: held.start):
            if held.start > end:
                holes.append((end, held.start))
            end = held.start + held.held_count
        return [*holes, (end, self._capacity)] if end < self._capacity else holes

    def _unusable_count(self, waiting: Need) -> int:
        size, unusable = self._size_of(waiting), 0
        for start, end in self._holes():
            first = self._first(start, size)
            fitting = max(0, (end - first) // size) * size
            unusable += end - start - fitting
        return unusable


class PagedAllocator(_Accounts):
    """Blocks of `block_tokens`, the engine's own pool, one after another as tokens come."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        super().__init__()
        self.block_tokens = block_tokens
        self._pool = DeviceBlockPool(capacity // block_tokens)
        self._blocks: dict[str, list[int]] = {}

    def admit(self, request_id: str, need: Need) -> bool:
        count = -(-need.prompt_count // self.block_tokens)
        if count > self._pool.free_count:
            return False
        self._blocks[request_id] = self._pool.take(count)
        self._held[request_id] = _Held(need, need.prompt_count, count * self.block_tokens)
        return True

    def append(self, request_id: str) -> bool:
        held = self._held[request_id]
        if held.used_count == held.held_count:
            if self._pool.free_count == 0:
                return False
            self._blocks[request_id] += self._pool.take(1)
            held.held_count += self.block_tokens
        held.used_count += 1
        assert held.held_count - held.used_count < self.block_tokens, "more than a tail is unused"
        return True

    def release(self, request_id: str) -> None:
        self._pool.release(self._blocks.pop(request_id))
        del self._held[request_id]


class VirtualAllocator(_Accounts):
    """One run of addresses for each request; the operating system maps a page at its first touch.

    On a CPU: anonymous memory without reserve, given back by MADV_DONTNEED; `capacity` limits the
    pages touched at once. (On CUDA the VMM calls would map pages of 2 MiB: not written.) Of a real
    model each layer has its own runs of keys and values, so a page holds the tokens of one layer.
    """

    def __init__(self, capacity: int, context_max: int, *, token_bytes: int) -> None:
        super().__init__()
        assert mmap.PAGESIZE % token_bytes == 0
        self.page_tokens = mmap.PAGESIZE // token_bytes
        self._page_count_max = capacity // self.page_tokens
        self._run_bytes = -(-context_max * token_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._runs: dict[str, mmap.mmap] = {}
        self.page_count = 0  # Mapped now.

    def admit(self, request_id: str, need: Need) -> bool:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        held = _Held(need, 0, 0)
        count = -(-need.prompt_count // self.page_tokens)
        if self.page_count + count > self._page_count_max:
            return False
        self._runs[request_id] = mmap.mmap(-1, self._run_bytes, flags=flags)
        self._held[request_id] = held
        for _ in range(count):
            self._touch(request_id, held)
        held.used_count = need.prompt_count
        return True

    def append(self, request_id: str) -> bool:
        held = self._held[request_id]
        if held.used_count == held.held_count:
            if self.page_count == self._page_count_max:
                return False
            self._touch(request_id, held)
        held.used_count += 1
        return True

    def release(self, request_id: str) -> None:
        run, held = self._runs.pop(request_id), self._held.pop(request_id)
        self.page_count -= held.held_count // self.page_tokens
        run.madvise(mmap.MADV_DONTNEED)
        run.close()

    def _touch(self, request_id: str, held: _Held) -> None:
        self._runs[request_id][held.held_count // self.page_tokens * mmap.PAGESIZE] = 1
        held.held_count += self.page_tokens
        self.page_count += 1


def max_length(context_max: int) -> Callable[[Need], int]:
    """Every request may become as long as any."""
    return lambda need: context_max


def power_of_two(need: Need) -> int:
    """Known within a factor of two."""
    return 1 << (need.total_count - 1).bit_length()


def exact(need: Need) -> int:
    """Known beforehand."""
    return need.total_count
